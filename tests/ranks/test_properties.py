"""Whatever the values and the node shape: what replicas make of their rows is what one process makes of all.

Rank 0 draws the examples, which differ from shape to shape, and every rank makes the values of all replicas. Ranks tell each
other what they found before any of them leaves an example: one that is wrong on one rank is wrong on all. They would not draw
the same: Hypothesis prefers constants of the modules that a process has imported, and ranks import different ones.
"""

from zlib import crc32

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mpistrat.context.values import PerReplica
from tests.reference import check, random_values

LENGTHS = st.lists(st.integers(0, 6), min_size=8, max_size=8)
EXTENTS = st.lists(st.integers(0, 4), max_size=2)
SEEDS = st.integers(0, 2**16)

# Not shrunk, which would take as long as it likes; health checks watch the clock, and ranks would differ in what they find.
EXAMPLES = settings(
    derandomize=True, deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
)


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
