"""The GPU that this process computes on, if any: bound once, before MPI starts. `mpistrat run` reads it without NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpistrat.device.cuda import Device

_bound: Device | None = None
_why_cpu = ""


def bind(device: Device | None, why_cpu: str = "") -> None:
    """Set the GPU that this process computes on; None: its CPU, and why."""
    global _bound, _why_cpu
    _bound, _why_cpu = device, why_cpu


def bound_device() -> Device | None:
    """Return the GPU of this process; None if it computes on its CPU."""
    return _bound


def own_device() -> str:
    """Return TensorFlow's name of this process's device: ``/gpu:0``, whichever GPU that is, or ``/cpu:0``."""
    return "/cpu:0" if _bound is None else "/gpu:0"


def why_cpu() -> str:
    """Return why this process computes on its CPU: CuPy is not installed, say; empty if it has a GPU, or MPI is not started."""
    return _why_cpu
