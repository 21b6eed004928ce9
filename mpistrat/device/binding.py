"""The GPU that this process computes on, if it does: bound once, before MPI starts, and asked for by everybody else."""

from __future__ import annotations

from mpistrat.device.base import Device

__all__ = ["bind", "bound_device"]

_bound: Device | None = None


def bind(device: Device | None) -> None:
    """Let this process compute on a GPU; None: on its CPU."""
    global _bound
    _bound = device


def bound_device() -> Device | None:
    """Return the GPU of this process; None where it computes on its CPU."""
    return _bound
