"""The CrossDeviceOps family over real collectives: where results land, packs, and what happens when one rank cannot go on."""

import numpy as np
import pytest

from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.cross_device.ops import (
    CollectiveAllReduce,
    HierarchicalAllReduce,
    HierarchicalCopyAllReduce,
    ReductionToOneDevice,
)
from mpistrat.cross_device.pairs import OnSomeReplicas
from mpistrat.errors import AgreementError, InvalidArgumentError
from tests.launches import needs_ranks, up_to_ranks
from tests.ranks.cases import case

pytestmark = up_to_ranks(3)

FAMILY = [
    HierarchicalAllReduce(),
    HierarchicalAllReduce(3),
    CollectiveAllReduce(),
    HierarchicalCopyAllReduce(),
    ReductionToOneDevice(),
]


def plain(value):
    """Return what this rank can read of a result, as lists."""
    return None if isinstance(value, OnSomeReplicas) and not value.is_here else np.asarray(value).tolist()


def suits(ops, strategy):
    return not isinstance(ops, HierarchicalCopyAllReduce) or strategy.extended.communicator.world.num_nodes == 1


def test_a_batch_lands_where_it_is_wanted(comm, strategy):
    for ops in FAMILY:
        with case(ops):
            _check_batch(ops, comm, strategy)


def _check_batch(ops, comm, strategy):
    rank, size = comm.rank, comm.size
    if not suits(ops, strategy):
        with (
            strategy.scope(),
            pytest.raises(NotImplementedError, match="reduces over the ranks of one node, but these replicas are"),
        ):
            ops.reduce("sum", PerReplica(1.0), "/cpu:0")
        return
    last, total = size - 1, sum(range(size))
    with strategy.scope():
        value = PerReplica(np.arange(1000.0) + rank)
        rows = PerReplica(IndexedSlices(np.full((rank, 2), 1, np.float16), np.zeros(rank, int), (3, 2)))
        small = PerReplica(np.array(rank, np.int16))
        results = ops.batch_reduce(
            "sum", [(small, last), (rows, value), (value, value), (rows, f"rank:{last}"), (small, {0, last})]
        )
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

    def fails(parts):
        raise ZeroDivisionError("not today")

    ops, last = ReductionToOneDevice(comm.size - 1, fails), comm.rank == comm.size - 1
    error, message = (
        (ZeroDivisionError, "not today") if last else (AgreementError, "which failed: ZeroDivisionError: not today")
    )
    with strategy.scope(), pytest.raises(error, match=message):
        ops.reduce("sum", PerReplica(1.0), "/cpu:0")


@needs_ranks(2)
def test_replicas_that_ask_for_different_things_are_told(comm, make_strategy):
    strategy = make_strategy(STRICT="1")
    first, value = comm.rank == 0, PerReplica(np.ones(2))
    calls = [
        lambda ops: ops.reduce("sum", value, 0 if first else 1),
        lambda ops: ops.reduce("sum" if first else "mean", value, 0),
        lambda ops: ops.batch_reduce("sum", [(value, 0)] * (1 if first else 2)),
        lambda ops: ops.reduce("sum", value if first else PerReplica(IndexedSlices([1.0], [0])), 0),
        lambda ops: ops.broadcast(np.ones(2), 0 if first else value),
    ]
    with strategy.scope():
        for call in calls:
            with pytest.raises(AgreementError, match="ranks made different calls"):
                call(HierarchicalAllReduce())
        # what one rank refuses, no other waits for
        error, message = (InvalidArgumentError, "cannot be None") if first else (AgreementError, "cannot be None")
        destinations = None if first else value
        with pytest.raises(error, match=message):
            HierarchicalAllReduce().reduce("sum", value, destinations)
        with pytest.raises(error, match=message):
            HierarchicalAllReduce().broadcast(1.0, destinations)
        assert plain(HierarchicalAllReduce().reduce("sum", value, value)) == [comm.size] * 2
