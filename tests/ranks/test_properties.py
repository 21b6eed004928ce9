"""Whatever the values and the node shape: random programs, sums of rows, and bits that follow from the order of the replicas.

Rank 0 draws the examples, which differ from shape to shape, and every rank makes the values of all replicas. Ranks tell each
other what they found before any of them leaves an example: one that is wrong on one rank is wrong on all. They would not draw
the same: Hypothesis prefers constants of the modules that a process has imported, and ranks import different ones.
"""

import time
from typing import NamedTuple
from zlib import crc32

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.context.values import PerReplica
from mpistrat.reduction import HALF_DTYPES, ReduceOp
from mpistrat.transports.mpi_world import MpiAllReduce
from mpistrat.transports.window import MOST_SMALL_BYTES
from tests.fuzz.cases import NUM_KINDS, Field
from tests.launches import on_ranks, up_to_ranks
from tests.reference import check, random_values

LENGTHS = st.lists(st.integers(0, 6), min_size=8, max_size=8)
EXTENTS = st.lists(st.integers(0, 4), max_size=2)
SEEDS = st.integers(0, 2**16)

# Not shrunk, which would take as long as it likes; health checks watch the clock, and ranks would differ in what they find.
CHECKS = list(HealthCheck)
EXAMPLES = settings(derandomize=True, deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=CHECKS)


def check_examples(comm, shape, check, *drawn, most=None):
    """Call ``check(*example)`` for examples of what is drawn, in step with the other ranks; for other shapes others."""

    def check_together(example):
        problem = ""
        try:
            check(*example)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(comm.allgather(problem)) if text]
        if problems:
            raise AssertionError("\n".join(problems))

    @seed(crc32(shape.encode()))
    @settings(EXAMPLES, max_examples=most or min(25, 40 // comm.size))
    @given(st.tuples(*drawn))
    def draw(example):
        check_together(comm.bcast(example))

    if comm.rank == 0:
        try:
            draw()
        finally:
            comm.bcast(None)
        return
    failure = None
    while (example := comm.bcast(None)) is not None:
        try:
            check_together(example)
        except AssertionError as error:
            failure = error
    if failure is not None:
        raise failure


def rows_of_all(code, lengths, extents, number, op):
    """Return rows of each rank; every order of combining them gives the same."""
    shapes = [(length, *extents) for length in lengths]
    rngs = [np.random.default_rng((number, rank)) for rank in range(len(lengths))]
    return [np.array(random_values(rng, np.dtype(code), shape, op, True)) for rng, shape in zip(rngs, shapes, strict=True)]


def test_reducing_over_rows_is_exact(comm, shape, strategy):
    def check_one(code, lengths, extents, everything, number):
        dtype = np.dtype(code)
        parts = rows_of_all(code, lengths[: comm.size], extents, number, "MEAN")
        rows = np.concatenate(parts)
        axis = tuple(range(rows.ndim)) if everything else 0
        wide = {"b": np.int64, "i": np.int64, "u": np.uint64, "f": np.float64, "c": np.complex128}[dtype.kind]
        total = np.asarray(np.add.reduce(rows, axis, dtype=wide))
        mine = PerReplica(parts[comm.rank])
        summed = np.dtype(np.int64) if dtype.kind == "b" else dtype
        check(np.asarray(strategy.reduce("sum", mine, axis=axis)), total.astype(summed), None, summed)
        mean = np.asarray(strategy.reduce("mean", mine, axis=axis))
        assert mean.dtype == (np.float64 if dtype.kind in "biu" else dtype)
        with np.errstate(invalid="ignore"):  # no rows at all
            wanted = total.astype(np.promote_types(wide, np.float64)) / (rows.size if everything else len(rows))
        eps = np.finfo(mean.dtype).eps
        assert np.allclose(mean.astype(wanted.dtype), wanted, rtol=2 * eps, atol=0, equal_nan=True), (mean, wanted)

    check_examples(comm, shape, check_one, st.sampled_from("?bBhHiIqQefdFD"), LENGTHS, EXTENTS, st.booleans(), SEEDS)


ROUNDING = [np.dtype(dtype) for dtype in (np.float32, np.float64, np.complex64, ml_dtypes.bfloat16)]
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
    st.sampled_from(ROUNDING),
    st.integers(0, 2**16),
    st.lists(st.sampled_from([0, 1, 2, 7, 60, 400]), min_size=1, max_size=5),
    st.sampled_from([0, 1, 24, 500, 10**6]),
    st.sampled_from([None, 0, 1, 3]),
    st.sampled_from(["auto", "flat", "hierarchical"]),
    st.integers(0, 16),  # a rank, or with none of this number nobody
)


def values_of(call, size):
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
        given = values_of(call, comm.size)
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


TURNS = {1: 2, 2: 2}  # of each kind of case, by the number of ranks


@up_to_ranks(8)
def test_random_programs_are_right(comm, shape, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    field = Field(comm.Dup(), crc32(shape.encode()))
    for number in range(NUM_KINDS * TURNS.get(comm.size, 1)):
        problem = ""
        try:
            field.play(number, evenly=True)
        except AssertionError as error:
            problem = f"case {number} on rank {comm.rank}: {field.note}\n    {error}"
        problems = list(filter(None, comm.allgather(problem)))  # one that is wrong on one rank is wrong on all
        assert not problems, "\n".join(problems)
    field.close()
    field.comm.Free()
