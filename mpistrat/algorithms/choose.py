"""Choose the plan of an all-reduce on a world, and say why.

============  ======================================  ======================================================
algorithm     phases                                  chosen for
============  ======================================  ======================================================
flat          one, over all ranks                     small buffers: up to some hundred KiB
leader        reduce, all-reduce, broadcast           none by ``auto``; one rank of each node sends to other nodes
hierarchical  reduce-scatter, all-reduce, all-gather  medium buffers: from about 512 KiB
pipelined     the same, on overlapping chunks         large buffers: from about 1 MiB
============  ======================================  ======================================================

File law: the choice depends on nothing but the arguments, so that all ranks make the same one without communicating.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mpistrat.algorithms import flat, hierarchical, leader, pipelined
from mpistrat.algorithms.cost import DEFAULT, CostModel, predict_seconds
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.errors import InvalidArgumentError, Unsuitable
from mpistrat.topology.world import World

__all__ = ["PLANNERS", "Candidate", "Choice", "choose"]

PLANNERS: dict[str, Callable[[World, int, int, int], Plan]] = {
    "flat": flat.plan,
    "leader": leader.plan,
    "hierarchical": hierarchical.plan,
    "pipelined": pipelined.plan,
}
"""The planner of each algorithm: ``plan(world, count, itemsize, chunk_bytes)`` returns the plan for a buffer of `count`
elements, and raises Unsuitable on a world that it is not for. Only ``pipelined`` uses `chunk_bytes`, the size of every chunk;
the chunk of the others is the whole buffer, or as much of it as the limit of scratch memory allows."""


@dataclass(frozen=True)
class Candidate:
    """The plan of one algorithm, or why it declined.

    Attributes
    ----------
    algorithm : str
        A name in `PLANNERS`.
    plan : Plan or None
        Its plan; None if it declined.
    seconds : float
        The predicted time of the plan; infinity if it declined.
    declined : str
        Why it declined; empty if it did not.
    """

    algorithm: str
    plan: Plan | None
    seconds: float = math.inf
    declined: str = ""


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
    one_intra_phase: bool = False,
) -> Choice:
    """Choose the plan of an all-reduce.

    Parameters
    ----------
    world : World
        The nodes and ranks.
    count : int
        Elements of the buffer.
    itemsize : int
        Bytes of one element.
    algorithm : str
        A name in `PLANNERS`, or ``auto``: the one with the shortest predicted time, the first of those that tie.
    chunk_bytes : int
        The largest chunk of a pipelined plan, in bytes; 0: chosen by the planner.
    model : CostModel
        Predicts the times.
    wire_itemsize : int
        Bytes of one element between nodes, if it is cast for that; 0: `itemsize`.
    one_intra_phase : bool
        On a single node, plan one INTRA all-reduce instead of a reduce-scatter and an all-gather: NCCL does that faster.

    Raises
    ------
    InvalidArgumentError
        If the name is unknown, or a number is out of range.
    Unsuitable
        If the algorithm asked for by name declines.
    """
    _check(count, itemsize, algorithm, chunk_bytes)
    plans = ((name, partial(_plan, name, world, count, itemsize, chunk_bytes, one_intra_phase)) for name in PLANNERS)
    considered = tuple(_consider(name, plan, model, wire_itemsize) for name, plan in plans)
    fastest, *others = sorted(considered, key=lambda candidate: candidate.seconds)
    if algorithm == "auto":
        chosen, reason = fastest, _why_fastest(fastest, others[0])
    else:
        chosen = next(candidate for candidate in considered if candidate.algorithm == algorithm)
        reason = f"{algorithm} was asked for by name; auto would choose {fastest.algorithm}"
    if chosen.plan is None:
        raise Unsuitable(_why_not(chosen, world, considered))
    return Choice(chosen.plan, reason, considered)


def _check(count: int, itemsize: int, algorithm: str, chunk_bytes: int) -> None:
    if algorithm != "auto" and algorithm not in PLANNERS:
        raise InvalidArgumentError(f"unknown algorithm {algorithm!r}; accepted are auto, {', '.join(PLANNERS)}")
    for name, value, least in (("count", count, 0), ("itemsize", itemsize, 1), ("chunk_bytes", chunk_bytes, 0)):
        if value < least:
            raise InvalidArgumentError(f"{name} must be at least {least}; got {value}")


def _plan(name: str, world: World, count: int, itemsize: int, chunk_bytes: int, one_intra_phase: bool) -> Plan:
    plan = PLANNERS[name](world, count, itemsize, chunk_bytes)
    if one_intra_phase and len(plan.phases) > 1 and {phase.scope for phase in plan.phases} == {Scope.INTRA}:
        return replace(plan, phases=(Phase(Verb.ALL_REDUCE, Scope.INTRA),))
    return plan


def _consider(name: str, make_plan: Callable[[], Plan], model: CostModel, wire_itemsize: int) -> Candidate:
    try:
        plan = replace(make_plan(), wire_itemsize=wire_itemsize)
    except Unsuitable as declined:
        return Candidate(name, None, declined=str(declined))
    return Candidate(name, plan, predict_seconds(plan, model))


def _why_fastest(fastest: Candidate, second: Candidate) -> str:
    against = "no other applies" if second.plan is None else f"{second.algorithm} {second.seconds * 1e3:.3g} ms"
    return f"{fastest.algorithm} is predicted fastest: {fastest.seconds * 1e3:.3g} ms; next: {against}"


def _why_not(named: Candidate, world: World, considered: tuple[Candidate, ...]) -> str:
    accepted = ", ".join(candidate.algorithm for candidate in considered if candidate.plan)
    return f"algorithm {named.algorithm!r} cannot be used on {world}, {named.declined}; accepted here are auto, {accepted}"
