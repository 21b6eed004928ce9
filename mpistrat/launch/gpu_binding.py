"""GPU binding: chosen by local rank, and done before MPI starts, because a CUDA-aware MPI uses the device that is current then.

Invariant: ``CUDA_VISIBLE_DEVICES`` is never written. Nothing is raised either: if one rank failed before MPI starts, the others
would wait for it in MPI_Init; errors are kept until all ranks can raise them together.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat import settings
from mpistrat.device import binding, cuda
from mpistrat.errors import SettingError
from mpistrat.launch.environment import LauncherView


@dataclass(frozen=True)
class Bound:
    """The device that this process has bound, and why."""

    why: str  # this GPU, or none
    place: tuple[int, int] | None = None  # local rank and size by which it was chosen; None if no GPU is bound
    launcher: str = ""  # that set the local rank; empty if none did, so that local rank 0 was assumed
    num_visible: int = 0  # GPUs that the process sees
    problem: str = ""  # the error that all ranks raise later, together


_bound: Bound | None = None


def bind_device(view: LauncherView | None) -> None:
    """Bind the GPU of this process's local rank, unless a device has been bound before."""
    global _bound
    if binding.bound_device() is None:
        _bound = _bind(view)


def bind_again(local_rank: int, local_size: int) -> None:
    """Bind another GPU, when no launcher has set the local rank and local rank 0 was assumed."""
    binding.bind(None)
    bind_device(LauncherView("the ranks that share memory", local_rank=local_rank, local_size=local_size))


def what_is_bound() -> Bound | None:
    """Return the result of `bind_device`; None if it was not called, or a device had been bound before."""
    return _bound


def choose_device(local_rank: int, local_size: int, num_visible: int) -> tuple[int, str]:
    """Return the index of the GPU of a rank among the visible ones, of which there is at least one, and why."""
    if num_visible == 1:
        return 0, "the only GPU that this process sees"
    place = f"local rank {local_rank} of {local_size}"
    if local_size <= num_visible:
        return local_rank, f"{place} on a node with {num_visible} GPUs"
    return local_rank % num_visible, f"{place} shares {num_visible} GPUs: {local_rank} mod {num_visible}"


def _bind(view: LauncherView | None) -> Bound:
    try:
        wanted = settings.DEVICE.read()
    except SettingError as error:
        return Bound("", problem=str(error))
    num_visible, missing = (0, f"{settings.DEVICE.name}=cpu") if wanted == "cpu" else cuda.count_visible()
    if not num_visible:
        binding.bind(None, missing)
        return Bound(missing, problem=f"{settings.DEVICE.name}=gpu was set, but {missing}" if wanted == "gpu" else "")
    place, launcher = (0, 1), ""
    if view is not None and view.local_rank is not None:
        place, launcher = (view.local_rank, view.local_size or view.local_rank + 1), view.launcher
    index, why = choose_device(*place, num_visible)
    device = cuda.CudaDevice(index)
    try:
        device.use()
    except RuntimeError as error:
        return Bound(why, problem=f"device {index} ({why}) cannot be used: {error}")
    binding.bind(device)
    return Bound(why, place, launcher, num_visible)
