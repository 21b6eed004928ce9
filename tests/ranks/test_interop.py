"""Arrays of PyTorch and JAX through every call of a strategy: each comes back as the kind it was."""

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.errors import AgreementError, InvalidArgumentError
from tests.gpu.interop import KINDS
from tests.launches import needs_ranks, on_ranks, up_to_ranks
from tests.other_arrays import CUDA, SpeaksDlpack, StandardArray, installed

pytestmark = up_to_ranks(3)

two_ranks = on_ranks(2)  # these libraries are heavy to start, and other numbers of ranks would tell nothing new
# why on the CPU is told where no test before has bound a device
_ELSEWHERE = r"value\['w'\] is on cuda:0, this replica computes on /cpu:0( \(.*\))?; copy it to host memory first"


@pytest.fixture(params=KINDS)
def kind(request):
    installed(request.param)
    return KINDS[request.param]("cpu")


def _bfloat16(kind, values):
    return kind.make(np.array(values, ml_dtypes.bfloat16))


def _elements(kind, value, dtype="float32"):
    """Return the elements of what must be an array of this library and this dtype."""
    found = kind.read(value)
    assert found.dtype.name == dtype
    return found.tolist()


def _run(strategy, step):
    """Return what `step`, given its replica context, returned on this rank."""
    result = strategy.run(lambda: step(mpistrat.get_replica_context()))
    return strategy.experimental_local_results(result)[0]


@two_ranks
def test_all_reduce_of_a_nest_of_all_kinds(kind, comm, strategy):
    def step(context):
        nest = {
            "mine": [kind.make(np.ones(2, np.float32)), kind.make(np.array(3, np.int32)), _bfloat16(kind, [0.5])],
            "numpy": (np.arange(3), np.float16(1), 2.5, None),
            "others": [StandardArray(np.ones(2)), SpeaksDlpack(np.ones(2)), memoryview(b"\x01")],
        }
        return context.all_reduce("sum", nest)

    total = _run(strategy, step)
    assert _elements(kind, total["mine"][0]) == [comm.size] * 2
    assert _elements(kind, total["mine"][1], "int32") == 3 * comm.size
    assert _elements(kind, total["mine"][2], "bfloat16") == [comm.size / 2]
    plain = [*total["numpy"][:3], *total["others"][1:]]
    assert {type(array) for array in plain} == {np.ndarray}
    assert [array.dtype.name for array in plain] == ["int64", "float16", "float64", "float64", "uint8"]
    assert [array.tolist() for array in plain[:3]] == [[0, comm.size, 2 * comm.size], comm.size, 2.5 * comm.size]
    assert total["numpy"][3] is None
    assert type(total["others"][0]) is StandardArray
    assert total["others"][0].numpy().tolist() == [comm.size] * 2


@two_ranks
def test_a_result_is_nobody_elses(kind, comm, strategy):
    for count in (1, 1_000, 100_000):
        given = [[kind.make(np.full(count, value, np.float32)) for _ in range(2)] for value in (1, 2)]
        found = _run(strategy, lambda context, given=given: [context.all_reduce("sum", arrays) for arrays in given])
        for results, value in zip(found, (1, 2), strict=True):
            for result in results:
                assert set(_elements(kind, result)) == {value * comm.size}


@two_ranks
def test_reduce_and_gather_in_cross_replica_context(kind, comm, strategy):
    value = strategy.run(lambda: [kind.make(np.full((comm.rank + 1, 2), comm.rank, np.float32)), np.ones(1)])
    rows = [rank for rank in range(comm.size) for _ in range(rank + 1)]
    mean, count = strategy.reduce("mean", value, axis=0)
    assert _elements(kind, mean) == [pytest.approx(sum(rows) / len(rows))] * 2
    assert (type(count), count) == (np.ndarray, 1)
    whole = strategy.gather(value[0], axis=0)
    assert _elements(kind, whole) == [[row] * 2 for row in rows]


@two_ranks
def test_variables(kind, comm, strategy):
    with strategy.scope():
        value = kind.make(np.full(3, comm.rank + 1, np.float32))
        variable = mpistrat.Variable(value, aggregation=mpistrat.VariableAggregation.MEAN)
        half = mpistrat.Variable(_bfloat16(kind, [1, 2]))
        variable.assign_add(kind.make(np.ones(3, np.float32)))
    assert (half.dtype.name, half.numpy().tolist()) == ("bfloat16", [1, 2])
    assert variable.numpy().tolist() == [2] * 3

    def step(context):
        variable.assign(kind.make(np.full(3, 2 * comm.rank, np.float32)))
        gradient = context.all_reduce("sum", kind.make(np.ones(3, np.float32)))
        context.update(variable, lambda array, gradient: kind.make(array) - gradient, (gradient,))

    _run(strategy, step)
    assert comm.allgather(variable.numpy().tolist()) == [[comm.size - 1.0 - comm.size] * 3] * comm.size


@two_ranks
def test_arrays_that_cannot_be_written_are_refused_as_targets(kind, strategy):
    value, numbers = kind.make(np.ones(2, np.float32)), [kind.make(np.ones(2, np.float32)), np.ones(2)]
    tensor, plain = strategy.communicator.all_reduce("sum", numbers)
    assert (_elements(kind, tensor), type(plain)) == ([2, 2], np.ndarray)
    if not kind.can_be_written:
        with pytest.raises(InvalidArgumentError, match="out must be an array to write to"):
            strategy.communicator.all_reduce("sum", value, out=value)


@needs_ranks(2)
def test_an_array_on_another_device_on_one_rank_is_refused_on_all(comm, strategy):
    is_elsewhere = comm.rank == comm.size - 1  # this needs neither library
    value = SpeaksDlpack(np.ones(2), CUDA) if is_elsewhere else np.ones(2)
    error, message = (InvalidArgumentError, _ELSEWHERE) if is_elsewhere else (AgreementError, _ELSEWHERE)
    with pytest.raises(error, match=message):
        _run(strategy, lambda context: context.all_reduce("sum", {"w": value}))
    assert comm.allreduce(1) == comm.size
