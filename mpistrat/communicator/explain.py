"""What a communicator tells: how an all-reduce is computed and how long that takes, and the memory for it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from mpistrat.algorithms.plan import chunks_text, phases_text
from mpistrat.algorithms.planners import Choice, measured_text
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.topology.world import World


@dataclass(frozen=True)
class Pack:
    """Arrays that share a buffer, and how it is reduced.

    Attributes
    ----------
    indices : tuple of int
        Indices of the arrays, in their order in the buffer.
    dtype : str
        The accumulation dtype.
    choice : Choice
        The plan, why it was chosen, and the time of every algorithm that was measured.
    transport : str
        What moves the arrays: of arrays in host memory what this replica uses. Empty if nothing is sent.
    """

    indices: tuple[int, ...]
    dtype: str
    choice: Choice
    transport: str = ""


@dataclass(frozen=True)
class Explanation:
    """How an all-reduce of some arrays is computed; ``print()`` shows it in full.

    Attributes
    ----------
    world : World
        The placement of the ranks on nodes.
    packs : tuple of Pack
        In the order in which they are reduced; none if there is one replica.
    source : str
        Where the measurements are by which algorithms were chosen; empty if nothing was measured.
    """

    world: World
    packs: tuple[Pack, ...] = ()
    source: str = ""

    def __str__(self) -> str:
        if not self.packs:
            return "one replica: nothing is sent" if self.world.size == 1 else "no arrays: nothing is sent"
        num_bytes = sum(pack.choice.plan.num_bytes for pack in self.packs)
        seconds = sum(pack.choice.seconds.get(pack.choice.plan.algorithm, inf) for pack in self.packs)
        summary = [
            ("world", str(self.world)),
            ("packs", f"{len(self.packs)}, {format_bytes(num_bytes)} in all"),
            *([("predicted", format_seconds(seconds))] if seconds < inf else []),
        ]
        texts = [self._describe(number, pack) for number, pack in enumerate(self.packs)]
        return "\n\n".join([format_table(summary), *texts, *([f"Measured: {self.source}."] if self.source else [])])

    def _describe(self, number: int, pack: Pack) -> str:
        plan = pack.choice.plan
        arrays = format_count(len(pack.indices), "array")
        heading = [
            (f"pack {number}", f"{format_bytes(plan.num_bytes)} of {pack.dtype} from {arrays}"),
            ("buffer", chunks_text(plan)),
            ("algorithm", plan.algorithm),
            ("why", pack.choice.reason),
            *([("transport", pack.transport)] if pack.transport else []),
        ]
        parts = [format_table(heading), phases_text(plan)]
        return "\n\n".join(parts + ([measured_text(pack.choice)] if pack.choice.seconds else []))


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
        Memory of plans that add in the order of the replicas or cast what they send.
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
