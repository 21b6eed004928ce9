"""Messages longer than MPI may be handed at once: every verb, with a limit of a few hundred bytes, and with any limit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from mpistrat.algorithms.choose import PLANNERS
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from mpistrat.transports import mpi, ring
from tests.launches import up_to_ranks
from tests.ranks.test_properties import NO_OPS, UFUNCS, check_examples

pytestmark = up_to_ranks(4)

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
LIMIT_BYTES = 300
COUNT = 1003


@pytest.fixture(params=["auto", "mpi"])
def limited(make_ops, request, world, monkeypatch):
    """Give collectives that were made under the limit, through shared memory and without."""
    monkeypatch.setattr("mpistrat.execution.executor.SMALL_RAIL_BYTES", LIMIT_BYTES)
    # messages that are bound, not those of calls whose arrays go straight to MPI
    monkeypatch.setattr(mpi, "as_message", checked(mpi.as_message))
    monkeypatch.setattr(ring, "as_message", checked(ring.as_message))
    return make_ops(world, MAX_MESSAGE_BYTES=str(LIMIT_BYTES), INTRA_TRANSPORT=request.param)


def checked(make):
    def message(*arguments):
        assert arguments[-1].nbytes <= LIMIT_BYTES, "MPI would be handed more than it may"
        return make(*arguments)

    return message


def total(ops, seed=0):
    return sum(given(rank, seed) for rank in range(ops.size))


def given(rank, seed=0):
    return np.random.default_rng([rank, seed]).integers(-9, 9, COUNT).astype(np.float32)


def test_what_combines_is_cut(limited):
    ops, mine = limited, given(limited.rank)
    options = [CommunicationOptions(algorithm=name) for name in PLANNERS]
    options += [CommunicationOptions(deterministic=True), CommunicationOptions(wire_dtype="bfloat16")]
    for wanted in options:
        for arrays in ([mine], [mine, mine[:7], mine.astype(np.float16)]):
            for _ in range(2):  # the second time around what was bound is run again
                results = ops.all_reduce(SUM, arrays, wanted)
                np.testing.assert_array_equal(results[0], total(ops), err_msg=str(wanted))
        np.testing.assert_array_equal(ops.start_all_reduce(SUM, [mine], wanted).wait()[0], total(ops))
    np.testing.assert_array_equal(ops.all_reduce(MEAN, [mine, mine])[1], total(ops) / np.float32(ops.size))
    small = [mine[:60], mine[:30]]  # a small batch, longer than a message all the same
    for _ in range(3):
        np.testing.assert_array_equal(ops.all_reduce(SUM, small)[0], total(ops)[:60])
    part = np.array_split(total(ops), ops.size)[ops.rank]
    np.testing.assert_array_equal(ops.reduce_scatter(SUM, mine), part)


def test_what_moves_is_cut(limited):
    ops, mine = limited, given(limited.rank)
    np.testing.assert_array_equal(
        ops.all_gather(mine[: COUNT - ops.rank]), np.concatenate([given(rank)[: COUNT - rank] for rank in range(ops.size)])
    )
    for rank, array in enumerate(ops.gather(mine, ops.size - 1) or []):
        np.testing.assert_array_equal(array, given(rank))
    arrived = ops.all_to_all([mine[: COUNT - peer] for peer in range(ops.size)])
    for rank, array in enumerate(arrived):
        np.testing.assert_array_equal(array, given(rank)[: COUNT - ops.rank])
    np.testing.assert_array_equal(ops.broadcast(mine, ops.size - 1), given(ops.size - 1))


class Cut(NamedTuple):
    """How arrays are cut into chunks, chunks into messages, and what sends these."""

    chunk_bytes: int
    messages: int
    inter: str
    intra: str

    @property
    def limit_bytes(self) -> int:
        return max(self.chunk_bytes // self.messages, 1)


CUTS = st.builds(
    Cut,
    st.sampled_from([256, 4096, 65536, 140_000]),
    st.integers(1, 12) | st.integers(13, 70),
    st.sampled_from(["auto", "mpi", "mpi_ring"]),
    st.sampled_from(["auto", "auto", "mpi"]),
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(list(UFUNCS)),
        st.sampled_from(["int8", "uint16", "int64", "float16", "float32", "complex128", "bfloat16"]),
        st.integers(0, 9),  # chunks
        st.integers(0, 99),  # bytes besides
        st.sampled_from(["", "deterministic", "wire", "scatter", "started", "two"]),
        st.integers(0, 2**16),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.ranks(nodes=["1x2", "2+1"])
def test_sums_are_right_whatever_the_limit(comm, shape, world, monkeypatch):
    names = ["auto", *PLANNERS]

    def check_one(cut, algorithm, calls):
        monkeypatch.setenv("MPISTRAT_CHUNK_BYTES", str(cut.chunk_bytes))
        monkeypatch.setenv("MPISTRAT_MAX_MESSAGE_BYTES", str(cut.limit_bytes))
        monkeypatch.setenv("MPISTRAT_INTER_TRANSPORT", cut.inter)
        monkeypatch.setenv("MPISTRAT_INTRA_TRANSPORT", cut.intra)
        ops = Communicator(Hierarchy(comm, world))
        try:
            for call in calls:
                check_call(ops, algorithm, cut, *call)
        finally:
            ops.close()

    check_examples(comm, shape, check_one, CUTS, st.sampled_from(names), CALLS)


def check_call(ops, algorithm, cut, op_name, dtype_name, chunks, besides, way, number):
    dtype, op = np.dtype(dtype_name), ReduceOp[op_name]
    if dtype.kind == "c" and op_name in NO_OPS["c"]:
        op_name, op = "SUM", SUM
    shape = ((chunks * cut.chunk_bytes + besides) // dtype.itemsize,)
    parts = [np.random.default_rng((number, rank)).integers(1, 4, shape).astype(dtype) for rank in range(ops.size)]
    total = UFUNCS[op_name].reduce([part.astype(np.complex128) for part in parts])  # small integers: exact in every dtype
    wanted = (
        total.real.astype(np.int64) // ops.size
        if op is MEAN and dtype.kind in "iu"
        else total / (ops.size if op is MEAN else 1)
    )
    options = CommunicationOptions(
        algorithm=algorithm,
        deterministic=way == "deterministic",
        wire_dtype="bfloat16" if way == "wire" and algorithm != "flat" else None,
    )
    for _ in range(2):  # the second time what was bound runs again
        if way == "scatter":
            results, wanted_here = (
                [ops.reduce_scatter(op, parts[ops.rank], options=options)],
                np.array_split(wanted, ops.size)[ops.rank],
            )
        elif way == "started":
            works = [ops.start_all_reduce(op, [parts[ops.rank]], options) for _ in range(2)]
            results, wanted_here = [array for work in works for array in work.wait()], wanted
        else:
            results, wanted_here = ops.all_reduce(op, [parts[ops.rank]] * (2 if way == "two" else 1), options), wanted
        for found in results:
            assert (found.dtype, found.shape) == (dtype, wanted_here.shape)
            np.testing.assert_allclose(found.astype(np.complex128), wanted_here, rtol=1e-2 if op is MEAN else 0)
