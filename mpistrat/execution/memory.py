"""MemoryReport: the memory that a strategy holds on a rank for communication."""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat.text import format_bytes, format_count

__all__ = ["MemoryReport"]


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
    """

    rank: int
    window_bytes: int = 0
    rail_bytes: int = 0
    plan_bytes: int = 0
    num_plans: int = 0
    largest_pack_bytes: int = 0
    device_bytes: int = 0
    pinned_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All memory, in bytes."""
        return self.window_bytes + self.rail_bytes + self.plan_bytes + self.device_bytes + self.pinned_bytes

    @property
    def ratio(self) -> float:
        """All memory divided by the largest pack; 0 if nothing was packed."""
        return self.total_bytes / self.largest_pack_bytes if self.largest_pack_bytes else 0.0

    def __str__(self) -> str:
        held = {"window": self.window_bytes, "rails": self.rail_bytes, "plans": self.plan_bytes}
        held |= {name: nbytes for name, nbytes in (("GPU", self.device_bytes), ("pinned", self.pinned_bytes)) if nbytes}
        parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held.items())
        return (
            f"rank {self.rank} holds {format_bytes(self.total_bytes)}: {parts} ({format_count(self.num_plans, 'plan')}); "
            f"{self.ratio:.3g} times its largest pack of {format_bytes(self.largest_pack_bytes)}"
        )
