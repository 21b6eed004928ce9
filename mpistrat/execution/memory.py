"""The memory that a strategy holds on a rank for communication, and what becomes of memory that collectives free."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import MALLOC_REUSES_BYTES
from mpistrat.text import format_bytes, format_count


@dataclass(frozen=True)
class MemoryReport:
    """The memory that the collectives of one rank use. Not in TensorFlow.

    The caller's arrays, results, and MPI's own memory are not counted.

    Attributes
    ----------
    rank : int
        The rank.
    window_bytes : int
        This rank's part of its node's shared memory window, or of ordinary memory where ranks share none.
    rail_bytes : int
        Receive buffers for segments from other nodes; all operations of a channel share them.
    plan_bytes : int
        Memory of plans that add in the order of the replicas or cast what they send, including error feedback.
    num_plans : int
        Number of cached plans.
    largest_pack_bytes : int
        The largest pack so far, in bytes.
    device_bytes : int
        Scratch memory on this rank's GPU.
    pinned_bytes : int
        Pinned host memory through which arrays on the GPU are staged.
    retained_bytes : int
        Memory of earlier results above 32 MiB of this process that no array uses, for later results.
    """

    rank: int
    window_bytes: int = 0
    rail_bytes: int = 0
    plan_bytes: int = 0
    num_plans: int = 0
    largest_pack_bytes: int = 0
    device_bytes: int = 0
    pinned_bytes: int = 0
    retained_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All memory, in bytes."""
        ours = self.window_bytes + self.rail_bytes + self.plan_bytes + self.retained_bytes
        return ours + self.device_bytes + self.pinned_bytes

    @property
    def ratio(self) -> float:
        """All memory divided by the largest pack; 0 if nothing was packed."""
        return self.total_bytes / self.largest_pack_bytes if self.largest_pack_bytes else 0.0

    def __str__(self) -> str:
        held = {"window": self.window_bytes, "rails": self.rail_bytes, "plans": self.plan_bytes}
        others = {"GPU": self.device_bytes, "pinned": self.pinned_bytes, "retained": self.retained_bytes}
        held |= {name: nbytes for name, nbytes in others.items() if nbytes}
        parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held.items())
        return (
            f"rank {self.rank} holds {format_bytes(self.total_bytes)}: {parts} ({format_count(self.num_plans, 'plan')}); "
            f"{self.ratio:.3g} times its largest pack of {format_bytes(self.largest_pack_bytes)}"
        )


@functools.cache
def keep_freed_memory() -> None:
    """Make malloc keep what is freed, up to 64 MiB, instead of returning it to the system; `new_array` keeps larger ones.

    Otherwise a collective that returns a new array of 1 MiB takes 257 page faults for the result, and as many for the buffer
    that MPI allocates and frees in each call. glibc raises its limits by itself once a block of up to 32 MiB has been freed
    (mallopt(3), M_MMAP_THRESHOLD), so one is allocated and freed here, untouched. That has no effect with another malloc, or if
    the user has set MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_.
    """
    with contextlib.suppress(MemoryError):
        np.empty(MALLOC_REUSES_BYTES, np.uint8)
