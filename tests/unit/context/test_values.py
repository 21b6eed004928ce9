"""Values with one component per replica: how they are read, taken apart and put together."""

import operator
from typing import Any, NamedTuple

import numpy as np
import pytest

import mpistrat
from mpistrat.context.values import Mirrored, PerReplica, regroup, select_replica
from tests.unit.replicas import on_replicas


class Pair(NamedTuple):
    first: Any
    second: Any


NUMBER_USES = ["bool(x)", "float(x)", "int(x)", "complex(x)", "[0, 1, 2, 3][x]", "f'{x:3d}'", "max(x, x)"]
NUMBER_USES += ["x == 3", "x != 3", "x == None", "x < 4", "x >= 4"]
ARRAY_USES = ["len(x)", "list(x)", "3 in x", "x[0]", "np.asarray(x)", "np.sum(x)", "x + 1", "np.ones(2) * x"]


@pytest.mark.parametrize("use", [*NUMBER_USES, *ARRAY_USES])
def test_a_per_replica_value_is_a_number_or_sequence_inside_run_alone(use):
    def function(x):
        return eval(use, {"np": np, "x": x})

    def component(rank):
        return np.array(3 - rank) if use in NUMBER_USES else np.array([3 - rank, 3])

    def program(strategy):
        value = PerReplica(component(strategy.rank))
        return np.asarray(select_replica(strategy.run(lambda: function(value)))).tolist()

    assert on_replicas(2, program) == [np.asarray(function(component(rank))).tolist() for rank in range(2)]
    message = r"per-replica value was read as one array or number outside strategy.run(.|\n)*correct: +strategy\.reduce\("
    with pytest.raises(mpistrat.errors.InvalidArgumentError, match=message) as raised:
        function(PerReplica(component(0)))
    assert "strategy.gather(" in str(raised.value)
    assert "strategy.experimental_local_results(" in str(raised.value)


def test_a_mirrored_value_reads_as_an_array_everywhere():
    array = np.arange(24.0).reshape(2, 3, 4)
    value = Mirrored(array)
    assert (value.shape, value.dtype, value.ndim, value.size, len(value)) == ((2, 3, 4), np.float64, 3, 24, 2)
    assert (value.nbytes, value.T.shape) == (192, (4, 3, 2))
    assert np.sum(np.ones(2), where=Mirrored(np.array([True, False]))) == 1
    assert (value[1, 2, 3], 23.0 in value, -1.0 in value) == (23, True, False)
    assert np.asarray(value, np.float32).dtype == np.float32
    assert (float(Mirrored(2.5)), int(Mirrored(3)), bool(Mirrored(0)), complex(Mirrored(2.0))) == (2.5, 3, False, 2)
    assert ([1, 2, 3][Mirrored(1)], list(range(mpistrat.Variable(2)))) == (2, [0, 1])
    with pytest.raises(TypeError, match="integer"):
        operator.index(Mirrored(0.25))
    text = f"{Mirrored(2.5):.2f} {Mirrored(2.5)} {PerReplica(3)} {PerReplica(3)!r}"
    assert text == "2.50 Mirrored(2.5) PerReplica(3) PerReplica(3)"


WRITES = ["x += 1", "x[0] = 1", "x @= np.ones((2, 2))", "np.add(1, 1, out=x)", "np.add(x, 1, out=x)", "np.add.at(x, [0, 0], 1)"]
WRITES += ["np.copyto(x, 1)", "np.copyto(dst=x, src=1)", "np.put(x, 0, 1)", "np.concatenate([np.zeros(1)] * 2, out=x)"]
WRITES += ["np.sum(np.zeros((2, 2)), axis=0, out=x)"]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", [Mirrored, PerReplica, mpistrat.Variable])
def test_no_distributed_value_is_changed_in_place(kind, write):
    value = kind(np.zeros(2))
    with pytest.raises(TypeError, match=r"cannot be the target of an in-place(.|\n)*correct: +variable.assign"):
        exec(write, {"np": np, "x": value})
    assert np.asarray(value.values[0]).tolist() == [0, 0]


def test_regroup_wraps_each_leaf_that_is_not_distributed_already():
    value, variable = Mirrored(4), mpistrat.Variable(1.0)
    grouped = regroup({"a": [1, None], "b": Pair(2, 3), "c": value, "d": variable}, num_replicas=2)
    assert (type(grouped["a"][0]), grouped["a"][1], type(grouped["b"])) == (PerReplica, None, Pair)
    assert grouped["c"] is value
    assert grouped["d"] is variable
    assert select_replica(grouped) == {"a": [1, None], "b": Pair(2, 3), "c": 4, "d": variable}
    alone = {"a": [1]}
    assert regroup(alone, num_replicas=1) is alone
