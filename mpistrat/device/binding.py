"""The GPU that this process computes on, if any: bound once, before MPI starts."""

from __future__ import annotations

from mpistrat.device.abstract import Device

__all__ = ["bind", "bound_device", "own_device"]

_bound: Device | None = None


def bind(device: Device | None) -> None:
    """Set the GPU that this process computes on; None: its CPU."""
    global _bound
    _bound = device


def bound_device() -> Device | None:
    """Return the GPU of this process; None if it computes on its CPU."""
    return _bound


def own_device() -> str:
    """Return TensorFlow's name of this process's device: ``/gpu:0``, whichever GPU that is, or ``/cpu:0``."""
    return "/cpu:0" if _bound is None else "/gpu:0"
