"""What the conformance kit puts in and expects: exact in every order, and nothing that poison could pass for."""

import itertools
from functools import reduce

import numpy as np
import pytest

from mpistrat.reduction import ReduceOp, combine
from mpistrat.testing.transport_suite import DTYPES, VERBS, Case, divisions, inputs, operations, poison

EVERY = [(dtype, op) for dtype in DTYPES for op in operations(dtype)]


@pytest.mark.parametrize(("dtype", "op"), EVERY, ids=str)
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
    array = np.empty(3, dtype)
    poison(array)
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
