"""deterministic=True: bits follow from the values and the order of the replicas, whatever else there is."""

from __future__ import annotations

import time
from typing import NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import HALF_DTYPES, ReduceOp
from mpistrat.transports.mpi_world import MpiAllReduce
from mpistrat.transports.window import MOST_SMALL_BYTES
from tests.launches import on_ranks, up_to_ranks
from tests.ranks.test_properties import check_examples

DTYPES = [np.dtype(dtype) for dtype in (np.float32, np.float64, np.complex64, ml_dtypes.bfloat16)]
LATE_SECONDS = 0.002


class Call(NamedTuple):
    """A sum as it is drawn: its values, and everything that must not matter."""

    op: ReduceOp
    dtype: np.dtype
    seed: int
    lengths: list[int]
    bytes_per_pack: int
    num_packs: int | None
    algorithm: str
    late: int


CALLS = st.builds(
    Call,
    st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD]),
    st.sampled_from(DTYPES),
    st.integers(0, 2**16),
    st.lists(st.sampled_from([0, 1, 2, 7, 60, 400]), min_size=1, max_size=5),
    st.sampled_from([0, 1, 24, 500, 10**6]),
    st.sampled_from([None, 0, 1, 3]),
    st.sampled_from(["auto", "flat", "hierarchical"]),
    st.integers(0, 16),  # a rank, or with none of this number nobody
)


def rows(call, size):
    """Return the values of each replica, of very different sizes, so that any other order rounds otherwise."""
    rng = np.random.default_rng(call.seed)
    shape = (size, sum(call.lengths))
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(call.dtype)


def folded(call, given):
    """Return what one process makes of them: one replica after the other, 16-bit floats in float32."""
    wide = given.astype(np.float32 if call.dtype in HALF_DTYPES else call.dtype)
    total = wide[0]
    for row in wide[1:]:
        total = total * row if call.op is ReduceOp.PROD else total + row
    return (total / wide.dtype.type(len(wide)) if call.op is ReduceOp.MEAN else total).astype(call.dtype)


@on_ranks(3)
def test_arrays_that_are_too_large_for_a_slot_once_they_are_padded_are_added_in_order(make_ops, monkeypatch):
    ops, by_mpi = make_ops(), []
    monkeypatch.setattr(MpiAllReduce, "steps", lambda *_: by_mpi.append(_) or iter(()))
    count = MOST_SMALL_BYTES // np.dtype(np.float64).itemsize  # no multiple of three
    ops.all_reduce(ReduceOp.SUM, [np.ones(5), np.ones(count - 5)], CommunicationOptions(deterministic=True))
    assert not by_mpi


@up_to_ranks(8)
def test_bits_are_those_of_one_process_that_adds_in_order(comm, make_ops, world):
    ops = make_ops(world, MAX_MESSAGE_BYTES="300")  # several segments of each part

    def check_one(call):
        given = rows(call, comm.size)
        arrays = np.split(given[comm.rank], np.cumsum(call.lengths)[:-1])
        packing = {"bytes_per_pack": call.bytes_per_pack, "num_packs": call.num_packs}
        options = CommunicationOptions(algorithm=call.algorithm, deterministic=True, **packing)
        if comm.rank == call.late:
            time.sleep(LATE_SECONDS)
        found = ops.all_reduce(call.op, arrays, options)
        assert [array.size for array in found] == call.lengths
        assert np.concatenate(found).tobytes() == folded(call, given).tobytes()

    # the same examples whatever the shape of the nodes
    check_examples(comm, "", check_one, CALLS, most=50 if comm.size == 3 else 12)
