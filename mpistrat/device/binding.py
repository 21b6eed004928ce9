"""The GPU that this process computes on, if it does: bound once, before MPI starts, and asked for by everybody else."""

from __future__ import annotations

from mpistrat.device.abstract import Device

__all__ = ["bind", "bound_device", "own_device"]

_bound: Device | None = None


def bind(device: Device | None) -> None:
    """Let this process compute on a GPU; None: on its CPU."""
    global _bound
    _bound = device


def bound_device() -> Device | None:
    """Return the GPU of this process; None where it computes on its CPU."""
    return _bound


def own_device() -> str:
    """Return TensorFlow's name of what this process computes on: ``/gpu:0``, whichever GPU that is, or ``/cpu:0``."""
    return "/cpu:0" if _bound is None else "/gpu:0"
