"""What a process holds, and what its GPU does: what must not grow while calls, plans and strategies come and go."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

from mpistrat.device import cuda

Holding = Callable[[Callable[[], None]], Mapping[str, float]]
"""Returns what is held, given a barrier."""

_SELF = Path("/proc/self")
_MIB = 1 << 20


def holding(barrier: Callable[[], None]) -> dict[str, float]:
    """Return what is held after all that is under way, and without what CuPy keeps for later. A collective call.

    Returns ``device_mib``: memory of the GPU, of all processes on it; ``allocations``: those of this library, and what it
    has mapped of others'; and the ``threads``, open ``files`` and ``mappings`` of this process.
    """
    import cupy

    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    barrier()
    free, total = cupy.cuda.runtime.memGetInfo()
    barrier()
    return {"device_mib": (total - free) / _MIB, "allocations": _allocations(), **_of_process()}


def growth(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return how much more is held, each as ``…_growth``."""
    return {f"{name}_growth": round(after[name] - before[name], 1) for name in before}


def _allocations() -> int:
    return sum(type(found) is cuda._Memory for found in gc.get_objects())


def _of_process() -> dict[str, float]:
    return {
        "threads": len(list((_SELF / "task").iterdir())),
        "files": len(list((_SELF / "fd").iterdir())),
        "mappings": len((_SELF / "maps").read_text().splitlines()),
    }
