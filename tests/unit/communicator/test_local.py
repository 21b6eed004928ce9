"""One replica: the same calls, checks and results as with several, and nothing is sent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from mpistrat.communicator.local import LocalCommunicator
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp


@pytest.mark.parametrize("op", ReduceOp)
def test_the_combination_of_one_component_is_a_copy(op: ReduceOp) -> None:
    arrays = [np.arange(6).reshape(2, 3)[:, ::-1], np.array(2.5), np.empty((0, 3))]
    results = LocalCommunicator().all_reduce(op, arrays)
    for result, array in zip(results, arrays, strict=True):
        assert np.array_equal(result, array)
        assert result.dtype == array.dtype
        assert not np.shares_memory(result, array)


def test_a_result_goes_where_it_is_told() -> None:
    array, target = np.arange(3.0)[::-1], np.full(3, np.nan)
    results = LocalCommunicator().all_reduce(ReduceOp.MEAN, [array], out=[target])
    assert results[0] is target
    assert target.tolist() == [2, 1, 0]
    in_place = np.arange(3.0)
    assert LocalCommunicator().all_reduce(ReduceOp.SUM, [in_place], out=[in_place])[0].tolist() == [0, 1, 2]


def test_results_may_be_written_over_other_arrays_of_the_batch() -> None:
    one, two = np.full(2, 1.0), np.full(2, 2.0)
    LocalCommunicator().all_reduce(ReduceOp.SUM, [one, two], out=[two, one])
    assert [one.tolist(), two.tolist()] == [[2, 2], [1, 1]]


@pytest.mark.parametrize(
    ("out", "found"),
    [
        ([np.zeros(4)], r"got float64 \(4,\), contiguous=True, writable=True"),
        ([np.zeros(3, np.float32)], r"got float32 \(3,\)"),
        ([np.zeros(6)[::2]], "contiguous=False"),
        ([np.broadcast_to(np.zeros(1), 3)], "writable=False"),
    ],
)
def test_a_place_that_does_not_fit_is_refused(out: list[np.ndarray], found: str) -> None:
    message = r"out must be a writable, C-contiguous float64 array of shape \(3,\); .*" + found
    with pytest.raises(InvalidArgumentError, match=message):
        LocalCommunicator().all_reduce(ReduceOp.SUM, [np.ones(3)], out=out)


def test_places_must_be_as_many_as_arrays() -> None:
    with pytest.raises(InvalidArgumentError, match="one array for each of the 2 that are passed; got 1"):
        LocalCommunicator().all_reduce(ReduceOp.SUM, [np.ones(3), np.ones(3)], out=[np.ones(3)])
    with pytest.raises(InvalidArgumentError, match="out holds an array twice"):
        LocalCommunicator().all_reduce(ReduceOp.SUM, [np.ones(3), np.ones(3)], out=[np.ones(3)] * 2)


def test_what_several_replicas_would_refuse_is_refused() -> None:
    with pytest.raises(UnsupportedDtypeError, match="MAX is not defined for value of dtype complex128"):
        LocalCommunicator().all_reduce(ReduceOp.MAX, [np.ones(1, complex)])
    with pytest.raises(InvalidArgumentError, match=r"needs arrays with at least one axis; got a scalar: pass x.reshape\(1\)"):
        LocalCommunicator().all_gather(np.array(1.0))
    with pytest.raises(
        InvalidArgumentError, match=r"axis 1 is out of range for an array of shape \(3,\): -1 to 0 are accepted"
    ):
        LocalCommunicator().all_gather(np.ones(3), axis=1)


def test_gathering_and_broadcasting_copy() -> None:
    array = np.arange(6).reshape(2, 3)
    for result in (LocalCommunicator().all_gather(array, axis=-1), LocalCommunicator().broadcast(array)):
        assert np.array_equal(result, array)
        assert not np.shares_memory(result, array)
    ops = LocalCommunicator()
    [gathered], [sent] = ops.gather(array), ops.all_to_all([array])
    for result in (gathered, sent, ops.reduce_scatter(ReduceOp.SUM, array, axis=1)):
        assert np.array_equal(result, array)
        assert not np.shares_memory(result, array)
    ops.barrier()
    assert ops.num_collectives == 4
    ops.close()


def test_what_is_started_has_ended() -> None:
    work = LocalCommunicator().start_all_reduce(ReduceOp.SUM, [np.ones(3)])
    assert work.done()
    assert work.wait()[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ops: ops.reduce_scatter(ReduceOp.SUM, np.array(1.0)), "reduce_scatter needs arrays with at least one axis"),
        (lambda ops: ops.gather(np.ones(1), root=1), "root must be a replica, 0 to 0; got 1"),
        (lambda ops: ops.broadcast(np.ones(1), root=-1), "root must be a replica, 0 to 0; got -1"),
        (lambda ops: ops.all_to_all([np.ones(1)] * 2), "all_to_all needs one array for each of the 1 replicas; got 2"),
    ],
    ids=["scatter", "gather", "broadcast", "all_to_all"],
)
def test_what_no_replica_could_do_is_refused(call: Callable[[LocalCommunicator], object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call(LocalCommunicator())


def test_what_was_closed_refuses_every_verb() -> None:
    closed, one = LocalCommunicator(), np.ones(1)
    closed.close(owner="MirroredStrategy")
    for call in (
        lambda: closed.all_reduce(ReduceOp.SUM, [one]),
        lambda: closed.start_all_reduce(ReduceOp.SUM, [one]),
        lambda: closed.reduce_scatter(ReduceOp.SUM, one),
        lambda: closed.all_gather(one),
        lambda: closed.gather(one),
        lambda: closed.all_to_all([one]),
        lambda: closed.broadcast(one),
        closed.barrier,
    ):
        with pytest.raises(RuntimeError, match="this strategy was closed: MirroredStrategy cannot communicate any more"):
            call()


def test_there_is_no_plan() -> None:
    ops = LocalCommunicator()
    assert (ops.rank, ops.size, ops.world.shape) == (0, 1, "1x1")
    assert ops.choose(1000, np.dtype(np.float32)) is None
    assert str(ops.explain(np.ones(1000, np.float32))) == "one replica: nothing is sent"


def test_no_mpi_is_started() -> None:
    program = (
        "import sys; sys.modules.update(mpi4py=None); import numpy as np;"
        "from mpistrat.communicator.local import LocalCommunicator;"
        "from mpistrat.reduction import ReduceOp; print(LocalCommunicator().all_reduce(ReduceOp.SUM, [np.ones(2)])[0].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[1.0, 1.0]\n"), done.stderr
