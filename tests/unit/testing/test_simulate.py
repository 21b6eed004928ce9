"""The simulator proves every plan, and catches wrong ones; what the conformance kit puts in is exact in every order."""

import dataclasses
import itertools
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.algorithms.planners import PLANNERS
from mpistrat.reduction import ReduceOp, combine
from mpistrat.testing.simulate import simulate
from mpistrat.testing.transport_suite import DTYPES, VERBS, Case, divisions, inputs, operations
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
    random_worlds, st.integers(0, 10**4) | st.integers(2**20, 2**22), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 4096)
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
        ("2x2", (TOGETHER, RAILS, GATHER), "intra all_reduce leaves its result elsewhere: it must be the last phase"),
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


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype in DTYPES for op in operations(dtype)], ids=str)
def test_sums_are_the_same_in_every_order(dtype, op):
    given = inputs(dtype, op, 50, 4, seed=1)
    assert (given.dtype, given.shape) == (dtype, (4, 50))
    totals = [reduce(combine(op), (given[row] for row in order)) for order in itertools.permutations(range(4))]
    expected = Case("all_reduce", dtype, op, 50, [0, 50, 50, 50, 50]).expected(given)
    assert all((total == expected).all() for total in totals)
    assert len(set(expected.tolist())) > 1, "a constant result would hide mistakes"
    halves = combine(op)(combine(op)(given[0], given[1]), given[2])
    assert (halves != expected).any(), "leaving one rank out must show"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_is_not_a_value_that_occurs(dtype):
    array = Case("all_reduce", dtype, ReduceOp.SUM, 3, [0, 3]).poisoned()
    assert np.isnan(array).all() if dtype.kind in "fc" else set(array.view(np.uint8)) == {0xA5}


def test_every_number_has_every_defined_operation_and_a_case_says_what_it_is():
    assert operations(np.dtype(np.float32)) == list(ReduceOp)
    assert operations(np.dtype(bool)) == [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD]
    assert operations(np.dtype(complex)) == [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD]
    dtype = np.dtype(np.int8)
    assert str(Case("all_reduce", dtype, ReduceOp.SUM, 3, [0, 3])) == "all_reduce(3 x int8, SUM)"
    assert str(Case("all_gather", dtype, ReduceOp.SUM, 3, [0, 3])) == "all_gather(3 x int8, SUM, bounds [0, 3])"


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 3, 67])
def test_divisions_cover_the_buffer(count, size):
    for bounds in divisions(count, size):
        assert len(bounds) == size + 1
        assert bounds[0] == 0
        assert bounds[-1] == count
        assert bounds == sorted(bounds)
    unequal = [np.diff(bounds) for bounds in divisions(67, 8)]
    assert max(unequal[0]) - min(unequal[0]) <= 1
    assert len(set(unequal[1])) > 3
    assert [list(parts).count(0) for parts in unequal[2:]] == [7, 7]


def test_what_each_verb_promises():
    given = np.array([[1, 2, 3], [10, 20, 30]])
    found = {}
    for verb in VERBS:
        case = Case(verb, given.dtype, ReduceOp.SUM, 3, [0, 1, 3])
        found[verb] = [case.expected(given)[case.promised(rank)].tolist() for rank in range(2)]
    assert found == {
        "all_reduce": [[11, 22, 33], [11, 22, 33]],
        "reduce_scatter": [[11], [22, 33]],
        "all_gather": [[1, 20, 30], [1, 20, 30]],
    }
