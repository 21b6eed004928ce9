"""What malloc does with memory that collectives free."""

from __future__ import annotations

import contextlib
import functools

import numpy as np

__all__ = ["keep_freed_memory"]

# with its header below the 32 MiB up to which glibc adapts its limits to what is freed
_FREED_BYTES = (32 << 20) - (64 << 10)


@functools.cache
def keep_freed_memory() -> None:
    """Make malloc keep what is freed, up to 64 MiB, instead of returning it to the system.

    Otherwise a collective that returns a new array of 1 MiB takes 257 page faults for the result, and as many for the buffer
    that MPI allocates and frees in each call. glibc raises its limits by itself once a block of up to 32 MiB has been freed
    (mallopt(3), M_MMAP_THRESHOLD), so one is allocated and freed here, untouched. That has no effect with another malloc, or if
    the user has set MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_.
    """
    with contextlib.suppress(MemoryError):
        np.empty(_FREED_BYTES, np.uint8)
