"""Which GPU this process drives: chosen by its place on the node, and bound before MPI starts, which looks at it then.

File law: ``CUDA_VISIBLE_DEVICES`` is CUDA's to read, and written by nobody here. Nothing is raised either: a rank that left
before MPI starts would be waited for by the others; what is wrong is kept, until all ranks have met.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat import settings
from mpistrat.device import binding, cuda
from mpistrat.errors import SettingError
from mpistrat.launch.environment import LauncherView

__all__ = ["Bound", "bind_again", "bind_device", "choose_device", "what_is_bound"]


@dataclass(frozen=True)
class Bound:
    """What this process has bound, and how that came.

    Attributes
    ----------
    why : str
        Why this GPU, or why none.
    place : tuple of int or None
        Its local rank and the number of ranks on its node, by which the GPU was chosen; None where it drives none.
    told_by : str
        Which launcher told the place; empty where none did, so that the first process of the node was assumed.
    num_visible : int
        GPUs that it sees.
    problem : str
        What must be raised once all ranks have met; empty where nothing is wrong.
    """

    why: str
    place: tuple[int, int] | None = None
    told_by: str = ""
    num_visible: int = 0
    problem: str = ""


_bound: Bound | None = None


def bind_device(view: LauncherView | None) -> None:
    """Let this process compute on the GPU that its place on the node gives it, unless it has been given a device before.

    Parameters
    ----------
    view : LauncherView or None
        What the launcher says of its place.
    """
    global _bound
    if binding.bound_device() is None:
        _bound = _bind(view)


def bind_again(local_rank: int, local_size: int) -> None:
    """Let this process compute on another GPU, where no launcher had told its place and the first one was assumed."""
    binding.bind(None)
    bind_device(LauncherView("the ranks that share memory", local_rank=local_rank, local_size=local_size))


def what_is_bound() -> Bound | None:
    """Return what `bind_device` did; None where it was not called, or a device had been bound before."""
    return _bound


def choose_device(local_rank: int, local_size: int, num_visible: int) -> tuple[int, str]:
    """Return which of the visible GPUs a rank drives, as CUDA counts in this process, and why.

    Parameters
    ----------
    local_rank, local_size : int
        Its place among the ranks of its node.
    num_visible : int
        GPUs that this process sees: at least one.
    """
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
    if wanted == "cpu":
        return Bound(f"{settings.DEVICE.name}=cpu")
    num_visible, missing = cuda.count_visible()
    if not num_visible:
        return Bound(missing, problem=f"{settings.DEVICE.name}=gpu was set, but {missing}" if wanted == "gpu" else "")
    place, told_by = (0, 1), ""
    if view is not None and view.local_rank is not None:
        place, told_by = (view.local_rank, view.local_size or view.local_rank + 1), view.launcher
    index, why = choose_device(*place, num_visible)
    device = cuda.CudaDevice(index)
    try:
        device.use()
    except RuntimeError as error:
        return Bound(why, problem=f"device {index} ({why}) cannot be used: {error}")
    binding.bind(device)
    return Bound(why, place, told_by, num_visible)
