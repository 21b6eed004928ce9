"""The CrossDeviceOps family over real collectives: where results land, packs, and what happens when one rank cannot go on."""

from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

import mpistrat
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.cross_device import OnSomeReplicas
from mpistrat.errors import AgreementError, InvalidArgumentError
from tests.launches import needs_ranks, up_to_ranks
from tests.ranks.cases import case

pytestmark = up_to_ranks(3)

FAMILY = [
    *(mpistrat.HierarchicalAllReduce(), mpistrat.HierarchicalAllReduce(3), mpistrat.CollectiveAllReduce()),
    *(mpistrat.HierarchicalCopyAllReduce(), mpistrat.ReductionToOneDevice()),
]


def plain(value):
    """Return what this rank can read of a result, as lists."""
    return None if isinstance(value, OnSomeReplicas) and not value.is_here else np.asarray(value).tolist()


def test_a_batch_lands_where_it_is_wanted(comm, strategy):
    for ops in FAMILY:
        with case(ops):
            _check_batch(ops, comm, strategy)


def _check_batch(ops, comm, strategy):
    rank, size = comm.rank, comm.size
    if isinstance(ops, mpistrat.HierarchicalCopyAllReduce) and strategy.communicator.world.num_nodes > 1:
        told = "reduces over the ranks of one node, but these replicas are"
        with strategy.scope(), pytest.raises(NotImplementedError, match=told):
            ops.reduce("sum", PerReplica(1.0), "/cpu:0")
        return
    last, total = size - 1, sum(range(size))
    with strategy.scope():
        value = PerReplica(np.arange(1000.0) + rank)
        rows = PerReplica(mpistrat.IndexedSlices(np.full((rank, 2), 1, np.float16), np.zeros(rank, int), (3, 2)))
        small = PerReplica(np.array(rank, np.int16))
        pairs = [(small, last), (rows, value), (value, value), (rows, f"rank:{last}"), (small, {0, last})]
        results = ops.batch_reduce("sum", pairs)
    if size == 1:
        assert [result is given.values[0] for result, given in zip(results, (small, rows, value, rows, small), strict=True)]
        return
    assert plain(results[0]) == (total if rank == last else None)
    assert plain(results[1]) == [[total, total], [0, 0], [0, 0]]
    assert (np.asarray(results[2]) == np.arange(1000.0) * size + total).all()
    assert plain(results[3]) == ([[total, total], [0, 0], [0, 0]] if rank == last else None)
    assert plain(results[4]) == (total if rank in (0, last) else None)
    assert [type(result) for result in results[1:3]] == [Mirrored, Mirrored]
    assert isinstance(results[4], Mirrored if size == 2 else OnSomeReplicas)
    assert value.values[0].tolist() == (np.arange(1000.0) + rank).tolist(), "an input was changed"


@needs_ranks(2)
@pytest.mark.parametrize("strict", ["0", "1"])
def test_an_accumulation_function_that_fails_is_told_to_all(comm, make_strategy, strict):
    strategy = make_strategy(STRICT=strict)
    fails, last = Mock(side_effect=ZeroDivisionError("not today")), comm.rank == comm.size - 1
    message = "not today" if last else "which failed: ZeroDivisionError: not today"
    with strategy.scope(), pytest.raises(ZeroDivisionError if last else AgreementError, match=message):
        mpistrat.ReductionToOneDevice(comm.size - 1, fails).reduce("sum", PerReplica(1.0), "/cpu:0")


@needs_ranks(2)
def test_a_target_that_does_not_fit_is_told_to_all_before_anything_is_reduced(comm):
    ops, is_last = mpistrat.ReductionToOneDevice(accumulation_fn=Mock(side_effect=sum)), comm.rank == comm.size - 1
    strategy = mpistrat.MirroredStrategy(cross_device_ops=ops)
    outs = [np.zeros(3 if is_last else 2), np.zeros(2)]
    error = InvalidArgumentError if is_last else AgreementError
    with pytest.raises(error, match="out must be a writable"):
        strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", [np.ones(2)] * 2, out=outs))
    assert not ops._accumulation_fn.called
    assert not any(out.any() for out in outs)
    strategy.close()


@needs_ranks(2)
def test_replicas_that_ask_for_different_things_are_told(comm, make_strategy):
    strategy = make_strategy(STRICT="1")
    first, value = comm.rank == 0, PerReplica(np.ones(2))
    calls = [
        lambda ops: ops.reduce("sum", value, 0 if first else 1),
        lambda ops: ops.reduce("sum" if first else "mean", value, 0),
        lambda ops: ops.batch_reduce("sum", [(value, 0)] * (1 if first else 2)),
        lambda ops: ops.reduce("sum", value if first else PerReplica(mpistrat.IndexedSlices([1.0], [0])), 0),
        lambda ops: ops.broadcast(np.ones(2), 0 if first else value),
    ]
    with strategy.scope():
        for call in calls:
            with pytest.raises(AgreementError, match="ranks made different calls"):
                call(mpistrat.HierarchicalAllReduce())
        # what one rank refuses, no other waits for
        destinations = None if first else value
        for call in (
            partial(mpistrat.HierarchicalAllReduce().reduce, "sum", value),
            partial(mpistrat.HierarchicalAllReduce().broadcast, 1.0),
        ):
            with pytest.raises(InvalidArgumentError if first else AgreementError, match="cannot be None"):
                call(destinations)
        assert plain(mpistrat.HierarchicalAllReduce().reduce("sum", value, value)) == [comm.size] * 2
