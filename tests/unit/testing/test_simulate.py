"""The simulator proves every plan, and catches wrong ones."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.algorithms.choose import PLANNERS
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.testing.simulate import simulate
from mpistrat.topology.world import World
from tests.unit.worlds import random_worlds

WORLD = Phase(Verb.ALL_REDUCE, Scope.WORLD)
SCATTER = Phase(Verb.REDUCE_SCATTER, Scope.INTRA)
RAILS = Phase(Verb.ALL_REDUCE, Scope.INTER)
GATHER = Phase(Verb.ALL_GATHER, Scope.INTRA)
TOGETHER = Phase(Verb.ALL_REDUCE, Scope.INTRA)
STRANGE = Phase(Verb.ALL_GATHER, Scope.INTER)


@settings(max_examples=500)
@given(
    random_worlds, st.integers(0, 10_000) | st.integers(2**20, 2**22), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 4096)
)
def test_plans_on_any_world_and_size_are_proved(world, count, itemsize, chunk_bytes):
    for planner in PLANNERS.values():
        simulate(planner(world, count, itemsize, chunk_bytes if count < 2**20 else 0))


def plan_of(shape, *phases):
    world = World.from_shape(shape)
    return Plan("planted", world, 100, 4, phases, 25 * world.num_shards)


@pytest.mark.parametrize(
    ("shape", "phases", "message"),
    [
        ("1x4", (WORLD, WORLD), "of rank 0 counted 4 times on rank 0 in shard 0, expected exactly once; 64 of 64"),
        ("2x2", (SCATTER, WORLD, GATHER), "contribution of rank 0 undefined on rank 0 in shard 0"),
        ("1x2", (SCATTER, WORLD), "contribution of rank 0 undefined on rank 0 in shard 0"),
        ("2x2", (TOGETHER,), "contribution of rank 2 counted 0 times on rank 0 in shard 0"),
        ("2x2", (TOGETHER, RAILS), "contribution of rank 2 counted 0 times on rank 0 in shard 1"),
        ("1x2", (TOGETHER, TOGETHER), "contribution of rank 0 counted 2 times on rank 0 in shard 0"),
        ("1x4", (SCATTER, TOGETHER), "contribution of rank 0 undefined on rank 0 in shard 0"),
        ("2x2", (STRANGE,), "'inter all_gather' is not defined; accepted are world all_reduce, intra reduce_scatter"),
    ],
)
def test_wrong_plans_are_caught(shape, phases, message):
    with pytest.raises(AssertionError, match=message):
        simulate(plan_of(shape, *phases))


@pytest.mark.parametrize("name", PLANNERS)
def test_every_phase_matters(name):
    plan = PLANNERS[name](World.from_shape("3+1+2+2"), 2**20, 4, 0)
    simulate(plan)
    for index, phase in enumerate(plan.phases):
        missing = plan.phases[:index] + plan.phases[index + 1 :]
        with pytest.raises(AssertionError, match=r"rank \d+ (counted|undefined).* in shard"):
            simulate(dataclasses.replace(plan, phases=missing))
        # gathering the same values again changes nothing; every sum must be taken once
        if phase.verb is not Verb.ALL_GATHER:
            twice = (*plan.phases[:index], phase, *plan.phases[index:])
            with pytest.raises(AssertionError, match=r"rank \d+ (counted|undefined).* in shard"):
                simulate(dataclasses.replace(plan, phases=twice))
    simulate(plan_of("1x2", TOGETHER))  # an all-reduce inside each node serves as well
    simulate(plan_of("3+1+2+2", TOGETHER, RAILS, GATHER))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"chunk_count": n}, f"chunk_count {n} is not a positive multiple of 2 shards") for n in (0, -2, 3)),
        ({"depth": 0}, "depth 0 lets no chunk start"),
    ],
)
def test_chunks_must_hold_equal_shards_and_some_must_start(changes, message):
    with pytest.raises(AssertionError, match=message):
        simulate(dataclasses.replace(plan_of("2x2", WORLD), **changes))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([(0, 50)], "chunks cover 50 of 100 elements"),
        ([(0, 50), (40, 50), (90, 10)], "a chunk of 50 elements at 40 follows elements up to 50"),
        ([(0, 40), (50, 50)], "a chunk of 50 elements at 50 follows elements up to 40"),
        ([(0, 52), (52, 48)], "hold 1 to 50 elements"),
        ([(0, 50), (50, 0), (50, 50)], "a chunk of 0 elements"),
    ],
)
def test_chunks_must_tile_the_buffer(monkeypatch, chunks, message):
    monkeypatch.setattr(Plan, "chunks", chunks)
    with pytest.raises(AssertionError, match=message):
        simulate(plan_of("2x2", WORLD))
