"""Choose the plan of an all-reduce on a world, and say why.

Invariant: the choice depends on nothing but the arguments, so that all ranks make the same one without communicating.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from mpistrat.algorithms import planners
from mpistrat.algorithms.chunks import COPIED_IN_CHUNKS_BYTES, DEVICE_CHUNK_BYTES
from mpistrat.algorithms.cost import DEFAULT, CostModel, predict_seconds
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.errors import InvalidArgumentError
from mpistrat.topology.world import World

PLANNERS: dict[str, Callable[[World, int, int, int], Sequence[Plan]]] = {
    "flat": planners.flat,
    "hierarchical": planners.hierarchical,
}
"""The planner of each algorithm: ``planner(world, count, itemsize, chunk_bytes)`` returns one or more plans for a buffer of
`count` elements, of which the one with the shortest predicted time is taken. `chunk_bytes` is the size of every chunk, 0 if the
caller asked for none."""


@dataclass(frozen=True)
class Candidate:
    """The plan of one algorithm, and its predicted time."""

    plan: Plan
    seconds: float


@dataclass(frozen=True)
class Choice:
    """A plan, why it was chosen, and the candidates of all algorithms, in the order of `PLANNERS`."""

    plan: Plan
    reason: str
    considered: tuple[Candidate, ...]


def choose(
    world: World,
    count: int,
    itemsize: int,
    algorithm: str = "auto",
    chunk_bytes: int = 0,
    model: CostModel = DEFAULT,
    wire_itemsize: int = 0,
) -> Choice:
    """Choose the plan of an all-reduce of host memory: with ``auto`` the one with the shortest predicted time, or the first.

    `chunk_bytes` is the largest chunk of a hierarchical plan; 0: chosen by the planner. `wire_itemsize` is the size of an
    element between nodes, if it is cast for that. An unknown name, or a number out of range, is an InvalidArgumentError.
    """
    _check(count, itemsize, algorithm, chunk_bytes)

    def fastest_of(planner: Callable[[World, int, int, int], Sequence[Plan]]) -> Candidate:
        plans = [replace(plan, wire_itemsize=wire_itemsize) for plan in planner(world, count, itemsize, chunk_bytes)]
        candidates = [Candidate(plan, predict_seconds(plan, model)) for plan in plans]
        # with one rank per node predictions leave out the copies, which overlap only where there are chunks
        is_copied = count * itemsize >= COPIED_IN_CHUNKS_BYTES and world.num_shards == 1
        copying = 2 * count * itemsize / model.memory_bytes_per_second if is_copied else 0.0
        best = min(candidates, key=lambda each: each.seconds + copying * (each.plan.depth == 1))
        return replace(best, seconds=min(each.seconds for each in candidates))

    considered = tuple(map(fastest_of, PLANNERS.values()))
    fastest, second, *_ = sorted(considered, key=attrgetter("seconds"))
    if algorithm == "auto":
        name, next_name = fastest.plan.algorithm, second.plan.algorithm
        times = f"{fastest.seconds * 1e3:.3g} ms; next: {next_name} {second.seconds * 1e3:.3g} ms"
        return Choice(fastest.plan, f"{name} is predicted fastest: {times}", considered)
    chosen = next(candidate for candidate in considered if candidate.plan.algorithm == algorithm)
    reason = f"{algorithm} was asked for by name; auto would choose {fastest.plan.algorithm}"
    return Choice(chosen.plan, reason, considered)


def choose_on_gpus(
    world: World, count: int, itemsize: int, algorithm: str = "auto", chunk_bytes: int = 0, wire_itemsize: int = 0
) -> Choice:
    """Choose the plan of an all-reduce of GPU memory; ``auto`` is ``hierarchical``, as nobody has measured where it loses.

    A single node has one INTRA all-reduce instead of a reduce-scatter and an all-gather: NCCL does that faster.
    """
    name = "hierarchical" if algorithm == "auto" else algorithm
    default = DEVICE_CHUNK_BYTES if world.num_nodes > 1 else 0  # else nothing overlaps
    plan = replace(PLANNERS[name](world, count, itemsize, chunk_bytes or default)[0], wire_itemsize=wire_itemsize)
    if len(plan.phases) > 1 and {phase.scope for phase in plan.phases} == {Scope.INTRA}:
        plan = replace(plan, phases=(Phase(Verb.ALL_REDUCE, Scope.INTRA),))
    return Choice(plan, "on GPUs auto is hierarchical" if algorithm == "auto" else f"{name} was asked for by name", ())


def _check(count: int, itemsize: int, algorithm: str, chunk_bytes: int) -> None:
    if algorithm != "auto" and algorithm not in PLANNERS:
        raise InvalidArgumentError(f"unknown algorithm {algorithm!r}; accepted are auto, {', '.join(PLANNERS)}")
    for name, value, least in (("count", count, 0), ("itemsize", itemsize, 1), ("chunk_bytes", chunk_bytes, 0)):
        if value < least:
            raise InvalidArgumentError(f"{name} must be at least {least}; got {value}")
