"""Simulate a plan in one process and count every contribution.

The state is a table of counts: how often the data of each source rank is contained in each shard on each rank. At the start
every rank holds its own data once; at the end of an all-reduce every rank must hold every rank's data exactly once in every
shard. Data summed twice is a 2, data forgotten is a 0; a comparison of sets would not see the first. Data that a phase leaves
undefined is poisoned, and so is every sum that includes it.

All chunks of a plan run the same phases on the same number of shards, so one chunk is simulated; that the chunks cover the
buffer is checked separately.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.topology.world import World

__all__ = ["simulate"]

State = NDArray[np.int64]
"""Counts, indexed by rank, shard and source rank; of several ranks by a list: a tuple would index several axes."""

POISON = -1
"""The count of data that is undefined."""


def simulate(plan: Plan) -> None:
    """Check that a plan is an all-reduce: the data of every rank, exactly once, on every rank.

    Parameters
    ----------
    plan : Plan
        On any world.

    Raises
    ------
    AssertionError
        If the chunks do not cover the buffer, a phase is not in the table of `algorithms.plan` or not where it may be, or a
        contribution is missing, counted more than once, or undefined somewhere. The message names the rank, the shard and the
        source.
    """
    _check_chunks(plan)
    world = plan.world
    state = np.zeros((world.size, world.num_shards, world.size), np.int64)
    state[range(world.size), :, range(world.size)] = 1
    for phase in plan.phases:
        if (phase.verb, phase.scope) not in _VERBS:
            known = ", ".join(f"{scope.value} {verb.value}" for verb, scope in _VERBS)
            raise AssertionError(f"{plan.algorithm} on {world}: phase {str(phase)!r} is not defined; accepted are {known}")
        _VERBS[phase.verb, phase.scope](world, state)
    _check_counts(plan, state)
    if Phase(Verb.ALL_REDUCE, Scope.INTRA) in plan.phases[:-1]:
        where = f"{plan.algorithm} on {world}"
        raise AssertionError(f"{where}: intra all_reduce leaves its result elsewhere: it must be the last phase")


def _check_chunks(plan: Plan) -> None:
    where, shards = f"{plan.algorithm} on {plan.world}", plan.world.num_shards
    if plan.chunk_count < 1 or plan.chunk_count % shards:
        raise AssertionError(f"{where}: chunk_count {plan.chunk_count} is not a positive multiple of {shards} shards")
    if plan.depth < 1:
        raise AssertionError(f"{where}: depth {plan.depth} lets no chunk start")
    reached = 0
    for start, length in plan.chunks:
        if start != reached or not 0 < length <= plan.padded(length) <= plan.chunk_count:
            raise AssertionError(
                f"{where}: a chunk of {length} elements at {start} follows elements up to {reached}; chunks must follow "
                f"each other and hold 1 to {plan.chunk_count} elements"
            )
        reached += length
    if reached != plan.count:
        raise AssertionError(f"{where}: chunks cover {reached} of {plan.count} elements")


def _check_counts(plan: Plan, state: State) -> None:
    wrong = np.argwhere(state != 1)
    if not len(wrong):
        return
    rank, shard, source = map(int, wrong[0])
    count = int(state[rank, shard, source])
    found = "undefined" if count == POISON else f"counted {count} times"
    raise AssertionError(
        f"{plan.algorithm} on {plan.world}: contribution of rank {source} {found} on rank {rank} in shard {shard}, expected "
        f"exactly once; {len(wrong)} of {state.size} contributions are wrong after {' -> '.join(map(str, plan.phases))}"
    )


def _total(parts: State) -> State:
    """Return the sum over the first axis, poisoned where any part is."""
    return np.where((parts == POISON).any(axis=0), POISON, parts.sum(axis=0))


def _world_all_reduce(world: World, state: State) -> None:
    state[:] = _total(state)


def _intra_reduce_scatter(world: World, state: State) -> None:
    for node in world.nodes:
        total = _total(state[[*node.ranks]])
        state[[*node.ranks]] = POISON
        for rank in node.ranks:
            owned = list(world.shards_of(rank))
            state[rank, owned] = total[owned]


def _intra_all_reduce(world: World, state: State) -> None:
    for node in world.nodes:
        state[[*node.ranks]] = _total(state[[*node.ranks]])


def _inter_all_reduce(world: World, state: State) -> None:
    for shard, rail in enumerate(world.rails):
        state[[*rail], shard] = _total(state[[*rail], shard])


def _intra_all_gather(world: World, state: State) -> None:
    for node in world.nodes:
        for shard in range(world.num_shards):
            state[[*node.ranks], shard] = state[world.owner(shard, node.index), shard]


_VERBS: dict[tuple[Verb, Scope], Callable[[World, State], None]] = {
    (Verb.ALL_REDUCE, Scope.WORLD): _world_all_reduce,
    (Verb.REDUCE_SCATTER, Scope.INTRA): _intra_reduce_scatter,
    (Verb.ALL_REDUCE, Scope.INTER): _inter_all_reduce,
    (Verb.ALL_GATHER, Scope.INTRA): _intra_all_gather,
    (Verb.ALL_REDUCE, Scope.INTRA): _intra_all_reduce,
}
