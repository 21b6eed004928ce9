"""Choose the plan of an all-reduce on a world, and say why: by what was measured there, else by a limit.

Invariant: the choice depends on nothing but the arguments, so that all ranks make the same one without communicating.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from mpistrat.algorithms import planners
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.text import format_bytes, format_seconds, format_table
from mpistrat.topology.world import World

PLANNERS: dict[str, Callable[[World, int, int, int], Plan]] = {
    "flat": planners.flat,
    "hierarchical": planners.hierarchical,
}
"""The planner of each algorithm: ``planner(world, count, itemsize, chunk_bytes)`` returns the plan for a buffer of `count`
elements. `chunk_bytes` is the size of every chunk, 0 if the caller asked for none."""


@dataclass(frozen=True)
class Measured:
    """What `mpistrat tune` has measured on one world: the seconds of each algorithm by bytes of the buffer; and where it is."""

    seconds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    source: str = ""

    def predict(self, num_bytes: int) -> dict[str, float]:
        """Return the seconds of each algorithm: linear between two sizes, in proportion to the bytes beyond the largest."""
        found = {}
        for name in filter(self.seconds.get, PLANNERS):
            sizes, seconds = zip(*sorted(self.seconds[name].items()), strict=True)
            found[name] = float(np.interp(num_bytes, sizes, seconds)) * max(1.0, num_bytes / sizes[-1])
        return found


NOTHING = Measured()


@dataclass(frozen=True)
class Choice:
    """A plan, why it was chosen, and the seconds that each algorithm is predicted to take: none where nothing was measured."""

    plan: Plan
    reason: str
    seconds: Mapping[str, float] = field(default_factory=dict)


def choose(
    world: World,
    count: int,
    itemsize: int,
    algorithm: str = "auto",
    chunk_bytes: int = 0,
    measured: Measured = NOTHING,
    wire_itemsize: int = 0,
) -> Choice:
    """Choose the plan of an all-reduce of host memory: with ``auto`` of the fastest algorithm, the first of those that tie.

    `chunk_bytes` is the size of the chunks of a hierarchical plan; 0: chosen by the planner. `wire_itemsize` is the size of an
    element between nodes, if it is cast for that.
    """
    seconds = measured.predict(count * itemsize)
    sent_itemsize = wire_itemsize if wire_itemsize and world.num_nodes > 1 else itemsize
    limit = planners.hierarchical_from_bytes(world) * sent_itemsize // itemsize
    best, reason = _fastest(seconds) if seconds else _by_limit(count * itemsize, limit)
    if algorithm != "auto":
        reason = f"{algorithm} was asked for by name; auto would choose {best}"
    planner = PLANNERS[best if algorithm == "auto" else algorithm]
    return Choice(replace(planner(world, count, itemsize, chunk_bytes), wire_itemsize=wire_itemsize), reason, seconds)


def choose_on_gpus(
    world: World, count: int, itemsize: int, algorithm: str = "auto", chunk_bytes: int = 0, wire_itemsize: int = 0
) -> Choice:
    """Choose the plan of an all-reduce of GPU memory; ``auto`` is ``hierarchical``, as nobody has measured where it loses.

    A single node has one INTRA all-reduce instead of a reduce-scatter and an all-gather: NCCL does that faster.
    """
    name, nothing_overlaps = "hierarchical" if algorithm == "auto" else algorithm, world.num_nodes == 1 and not chunk_bytes
    default = planners.SCRATCH_BYTES if nothing_overlaps else planners.DEVICE_CHUNK_BYTES
    plan = replace(PLANNERS[name](world, count, itemsize, chunk_bytes or default), wire_itemsize=wire_itemsize)
    if plan.scopes == {Scope.INTRA}:
        depth = 1 if nothing_overlaps else plan.depth
        plan = replace(plan, phases=(Phase(Verb.ALL_REDUCE, Scope.INTRA),), depth=depth)
    return Choice(plan, "on GPUs auto is hierarchical" if algorithm == "auto" else f"{name} was asked for by name")


def _fastest(seconds: Mapping[str, float]) -> tuple[str, str]:
    fastest, *others = sorted(seconds, key=lambda name: seconds[name])
    next_best = "".join(f"; next: {name} {format_seconds(seconds[name])}" for name in others[:1])
    return fastest, f"{fastest} is the fastest as measured: {format_seconds(seconds[fastest])}{next_best}"


def _by_limit(num_bytes: int, limit: int) -> tuple[str, str]:
    if num_bytes < limit:
        return "flat", f"on such nodes flat takes less than {format_bytes(limit)}"
    return "hierarchical", f"on such nodes hierarchical takes {format_bytes(limit)} and more"


def measured_text(choice: Choice) -> str:
    """Return the time of every algorithm that was measured, as a table."""
    chosen = choice.plan.algorithm
    rows = [(name, format_seconds(time), "chosen" if name == chosen else "") for name, time in choice.seconds.items()]
    return format_table([("algorithm", "as measured", ""), *rows])
