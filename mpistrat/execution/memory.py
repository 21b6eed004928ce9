"""MemoryReport: what a strategy holds on a rank to communicate."""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat.text import format_bytes, format_count

__all__ = ["MemoryReport"]


@dataclass(frozen=True)
class MemoryReport:
    """The memory that the collectives of one rank work in. Not in TensorFlow.

    Arrays of the caller, results, and what MPI itself holds are not counted.

    Attributes
    ----------
    rank : int
        Whose memory it is.
    window_bytes : int
        This rank's part of the window that the ranks of its node share, or as much ordinary memory where they do not.
    rail_bytes : int
        Where segments from other nodes land until they are summed; all operations of a channel share it.
    plan_bytes : int
        What plans hold of their own: those that add in the order of the replicas, or cast what they send, with what error
        feedback keeps.
    num_plans : int
        How many plans are kept.
    largest_pack_bytes : int
        The most that was reduced through one buffer so far, in bytes.
    device_bytes : int
        The part of its GPU's memory that arrays on the GPU go through.
    pinned_bytes : int
        Memory of the host through which they go on to other ranks, where they do.
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
        """All that is held, in bytes."""
        return self.window_bytes + self.rail_bytes + self.plan_bytes + self.device_bytes + self.pinned_bytes

    @property
    def ratio(self) -> float:
        """How many times the largest pack all that is held is; 0 where nothing was packed."""
        return self.total_bytes / self.largest_pack_bytes if self.largest_pack_bytes else 0.0

    def __str__(self) -> str:
        held = {"window": self.window_bytes, "rails": self.rail_bytes, "plans": self.plan_bytes}
        held |= {name: nbytes for name, nbytes in (("GPU", self.device_bytes), ("pinned", self.pinned_bytes)) if nbytes}
        parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held.items())
        return (
            f"rank {self.rank} holds {format_bytes(self.total_bytes)}: {parts} ({format_count(self.num_plans, 'plan')}); "
            f"{self.ratio:.3g} times its largest pack of {format_bytes(self.largest_pack_bytes)}"
        )
