"""Whatever the arrays, the operation, the packing and the node shape: results equal a reference made in one place.

Rank 0 draws the examples, which differ from shape to shape, and every rank makes the values of all replicas. Ranks tell each
other what they found before any of them leaves an example: one that is wrong on one rank is wrong on all. They would not draw
the same: Hypothesis prefers constants of the modules that a process has imported, and ranks import different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple
from zlib import crc32

import ml_dtypes
import numpy as np
import optree
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import mpistrat
from mpistrat.algorithms.choose import PLANNERS
from mpistrat.context.values import PerReplica
from mpistrat.experimental import CommunicationOptions
from tests.launches import up_to_ranks

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)
DTYPES = (*(np.dtype(code) for code in "?bBhHiIqQefdFD"), BFLOAT16)
NO_OPS = {"b": ("SUM", "MEAN"), "c": ("MIN", "MAX")}  # by kind of dtype: what is not defined
UFUNCS = {"SUM": np.add, "MEAN": np.add, "MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply}
NUM_PACKS = [None, 0, 1, 3]
NAMES = [dtype.name for dtype in DTYPES]
LENGTHS = st.lists(st.integers(0, 6), min_size=8, max_size=8)
EXTENTS = st.lists(st.integers(0, 4), max_size=2)
SEEDS = st.integers(0, 2**16)

# Not shrunk, which would take as long as it likes; health checks watch the clock, and ranks would differ in what they find.
EXAMPLES = settings(
    derandomize=True, deadline=None, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
)


def check_examples(
    comm: Any, shape: str, check: Callable[..., None], *drawn: st.SearchStrategy[Any], most: int | None = None
) -> None:
    """Call ``check(*example)`` for examples of what is drawn, in step with the other ranks; for other shapes others."""

    def check_together(example: tuple[Any, ...]) -> None:
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
    def draw(example: tuple[Any, ...]) -> None:
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


class Pair(NamedTuple):
    """A nest may hold named tuples."""

    left: Any
    right: Any


class Leaf(NamedTuple):
    """An array of every replica: which dtype and shape, how it lies in memory, and where its values come from."""

    dtype: str
    shape: tuple[int, ...]
    layout: str
    seed: int

    def of(self, replica: int, op: str, exact: bool) -> np.ndarray:
        """Return the array of a replica."""
        rng = np.random.default_rng((self.seed, replica))
        return LAYOUTS[self.layout](np.array(_values(rng, np.dtype(self.dtype), self.shape, op, exact)))


def _strided(array: np.ndarray) -> np.ndarray:
    if array.ndim == 0:
        return array
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C": lambda array: array,
    "Fortran": np.asfortranarray,
    "strided": _strided,
    "backwards": lambda array: array[::-1].copy()[::-1] if array.ndim else array,
    "read-only": _read_only,
    "scalar": lambda array: array if array.ndim else array[()],
    "columns": lambda array: np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 0, -1)), -1, 0) if array.ndim else array,
    "broadcast": lambda array: np.broadcast_to(array[:1], array.shape) if array.ndim else array,
}


def _values(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...], op: str, exact: bool) -> np.ndarray:
    """Return random values; exact ones combine to the same bits in every order."""
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        # the mean of 64-bit integers is summed in 64 bits, and must not wrap around
        low, high = (info.min // 16, info.max // 16) if op == "MEAN" and dtype.itemsize == 8 else (info.min, info.max)
        return rng.integers(low, high, shape, dtype, endpoint=True)
    if dtype.kind == "c":
        return (_floats(rng, shape, op, exact) + 1j * _floats(rng, shape, op, exact)).astype(dtype)
    values = _floats(rng, shape, op, exact)
    if op in ("MIN", "MAX") and exact:
        values = np.where(rng.random(shape) < 0.1, np.nan, values)
    return values.astype(dtype)


def _floats(rng: np.random.Generator, shape: tuple[int, ...], op: str, exact: bool) -> np.ndarray:
    if op == "PROD":
        return rng.choice([-2.0, -1.0, 1.0, 2.0], shape) if exact else rng.choice([-1, 1], shape) * rng.uniform(0.5, 2, shape)
    return rng.integers(-8, 9, shape).astype(np.float64) if exact else rng.normal(size=shape) * 10


def _leaves(op: str) -> st.SearchStrategy[Leaf]:
    dtypes = [dtype.name for dtype in DTYPES if op not in NO_OPS.get(dtype.kind, ())]
    shapes = st.one_of(st.just(()), st.just((0,)), st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple))
    shapes = st.one_of(shapes, st.integers(6, 300).map(lambda count: (count,)))
    return st.builds(Leaf, st.sampled_from(dtypes), shapes, st.sampled_from(sorted(LAYOUTS)), st.integers(0, 2**16))


def _nests(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def deeper(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inside, max_size=4),
            st.lists(inside, max_size=3).map(tuple),
            st.builds(Pair, inside, inside),
            st.dictionaries(st.sampled_from("wbxy"), inside, max_size=3),
        )

    return st.recursive(st.one_of(leaf, st.none()), deeper, max_leaves=8)


class Call(NamedTuple):
    """An all-reduce as it is drawn."""

    op: str
    nest: Any
    exact: bool
    algorithm: str
    bytes_per_pack: int
    num_packs: int | None


def _calls(algorithms: list[str]) -> st.SearchStrategy[Call]:
    return st.sampled_from(list(UFUNCS)).flatmap(
        lambda op: st.builds(
            Call,
            st.just(op),
            _nests(_leaves(op)),
            st.booleans(),
            st.sampled_from(algorithms),
            st.sampled_from([0, 1, 24, 500, 10**6]),
            st.sampled_from(NUM_PACKS),
        )
    )


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Leaf)


def _map(function: Callable[..., Any], nest: Any, *others: Any) -> Any:
    return optree.tree_map(function, nest, *others, is_leaf=_is_leaf)


ALGORITHMS = ["auto", "deterministic", *PLANNERS]


def options_of(call: Call) -> CommunicationOptions:
    if call.algorithm == "deterministic":
        return CommunicationOptions(bytes_per_pack=call.bytes_per_pack, deterministic=True)
    return CommunicationOptions(bytes_per_pack=call.bytes_per_pack, algorithm=call.algorithm)


def reference(op: str, parts: list[np.ndarray], exact: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Return what the parts combine to, and by how much a result may differ; None: not at all."""
    dtype = parts[0].dtype
    if dtype.kind == "b":
        return reduce(np.logical_or if op == "MAX" else np.logical_and, parts), None
    if dtype.kind in "iu":
        return _integers(op, parts), None
    wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
    total = np.asarray(reduce(UFUNCS[op], [part.astype(wide) for part in parts]))
    if op in ("MIN", "MAX"):
        return total.astype(dtype), None
    if exact and not (op == "MEAN" and dtype.kind == "c"):  # complex numbers are divided with several roundings
        if op == "MEAN":
            narrow = np.dtype(np.float32) if dtype in HALVES else dtype
            total = total.astype(narrow) / narrow.type(len(parts))
        return np.asarray(total, dtype), None
    mean = total / len(parts) if op == "MEAN" else total
    return mean, _bound(op, parts, mean, dtype)


def _integers(op: str, parts: list[np.ndarray]) -> np.ndarray:
    """Combine integers of Python, and wrap around at the end as fixed-width ones do."""
    dtype = parts[0].dtype
    total = np.asarray(reduce(UFUNCS[op], [part.astype(object) for part in parts]), object)
    if op == "MEAN":
        total = np.array([abs(value) // len(parts) * (-1 if value < 0 else 1) for value in total.flat], object)
    info = np.iinfo(dtype)
    wrapped = [(int(value) - int(info.min)) % 2 ** (8 * dtype.itemsize) + int(info.min) for value in total.flat]
    return np.array(wrapped, dtype).reshape(parts[0].shape)


def _bound(op: str, parts: list[np.ndarray], result: np.ndarray, dtype: np.dtype) -> np.ndarray:
    size = len(parts)
    held = ml_dtypes.finfo(dtype)
    working = np.finfo(np.float32) if dtype in HALVES else held
    magnitude = np.abs(result) if op == "PROD" else sum(np.abs(part.astype(result.dtype)) for part in parts)
    steps = 4 * size if op == "PROD" else size
    return steps * float(working.eps) * magnitude + float(held.eps) * np.abs(result) + float(held.smallest_subnormal)


def check(found: Any, wanted: np.ndarray, bound: np.ndarray | None, dtype: np.dtype) -> None:
    assert isinstance(found, np.ndarray), type(found)
    assert (found.dtype, found.shape) == (dtype, wanted.shape)
    wide = np.complex128 if dtype.kind == "c" else np.float64
    if bound is not None:
        assert np.all(np.abs(found.astype(wide) - wanted) <= bound), (found, wanted)
    elif dtype.kind in "biu":
        assert np.array_equal(found, wanted), (found, wanted)
    else:
        assert np.array_equal(found.astype(wide), wanted.astype(wide), equal_nan=True), (found, wanted)


def bits(array: np.ndarray) -> bytes:
    # real and imaginary parts that cancel are 0 or -0, as the order has it
    return (array + array.dtype.type(0)).tobytes() if array.dtype.kind == "c" else array.tobytes()


@pytest.fixture
def packers(shape: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int | None, mpistrat.Strategy]]:
    """Give a strategy for each way of cutting a batch, and under -1 one with all defaults; every other one is not strict."""
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", shape)
    made: dict[int | None, mpistrat.Strategy] = {}
    for index, num_packs in enumerate((-1, *NUM_PACKS)):
        monkeypatch.setenv("MPISTRAT_STRICT", str(index % 2))
        options = None if num_packs == -1 else CommunicationOptions(num_packs=num_packs)
        made[num_packs] = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    yield made
    for strategy in made.values():
        strategy.close()


def in_replica(strategy: mpistrat.Strategy, function: Callable[[Any], Any]) -> Any:
    """Return what a function of the replica context returns here."""
    [result] = strategy.experimental_local_results(strategy.run(lambda: function(mpistrat.get_replica_context())))
    return result


def all_reduced(strategy: mpistrat.Strategy, op: str, nest: Any, options: CommunicationOptions | None) -> Any:
    return in_replica(strategy, lambda context: context.all_reduce(op, nest, options=options))


@up_to_ranks(8)
def test_all_reduce(comm, shape, world, packers):
    def check_one(call: Call) -> None:
        mine = _map(lambda leaf: leaf.of(comm.rank, call.op, call.exact), call.nest)
        before = [np.array(array) for array in optree.tree_leaves(mine)]
        result = all_reduced(packers[call.num_packs], call.op, mine, options_of(call))
        plain = all_reduced(packers[-1], call.op, mine, None)
        leaves = optree.tree_leaves(call.nest, is_leaf=_is_leaf)
        assert optree.tree_structure(result) == optree.tree_structure(mine), "another structure came back"
        for leaf, array, old, found, unpacked in zip(
            leaves, optree.tree_leaves(mine), before, optree.tree_leaves(result), optree.tree_leaves(plain), strict=True
        ):
            parts = [np.asarray(leaf.of(rank, call.op, call.exact)) for rank in range(comm.size)]
            wanted, bound = reference(call.op, parts, call.exact)
            for one_way in (found, unpacked):
                check(one_way, wanted, bound, old.dtype)
            if bound is None or call.exact:
                assert bits(found) == bits(unpacked), f"packing changed the bits of {leaf}"
            assert np.asarray(array).tobytes() == old.tobytes(), "an input was changed"
            assert not np.shares_memory(found, array)
        everywhere = comm.allgather([bits(array) for array in optree.tree_leaves(result)])
        assert all(other == everywhere[0] for other in everywhere), "replicas got different results"

    check_examples(comm, shape, check_one, _calls(ALGORITHMS))


def test_gathering_is_concatenation(comm, shape, strategy):
    def check_one(dtype: str, lengths: list[int], extents: list[int], axis: int, number: int) -> None:
        axis = min(axis, len(extents))
        shapes = [(*extents[:axis], length, *extents[axis:]) for length in lengths[: comm.size]]
        parts = [Leaf(dtype, shape, "strided", number).of(rank, "SUM", False) for rank, shape in enumerate(shapes)]
        wanted = np.concatenate(parts, axis)
        outside = strategy.gather(PerReplica(parts[comm.rank]), axis=axis)
        from_the_end = axis - len(extents) - 1
        inside = in_replica(strategy, lambda context: context.all_gather({"a": [parts[comm.rank]]}, axis=from_the_end))
        for found in (outside, inside["a"][0]):
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert found.tobytes() == wanted.tobytes()

    check_examples(comm, shape, check_one, st.sampled_from(NAMES), LENGTHS, EXTENTS, st.integers(0, 2), SEEDS)


def test_reducing_over_rows_is_exact(comm, shape, strategy):
    def check_one(code: str, lengths: list[int], extents: list[int], everything: bool, number: int) -> None:
        dtype = np.dtype(code)
        leaves = [Leaf(dtype.name, (length, *extents), "C", number) for length in lengths[: comm.size]]
        parts = [leaf.of(rank, "MEAN", True) for rank, leaf in enumerate(leaves)]
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


def test_parts_of_a_sum_are_the_sum(comm, shape, strategy):
    def check_one(dtype: str, length: int, extents: list[int], axis: int, number: int) -> None:
        axis = min(axis, len(extents))
        leaf = Leaf(dtype, (*extents[:axis], length, *extents[axis:]), "Fortran", number)
        op = "MAX" if dtype == "bool" else "SUM"
        parts = [leaf.of(rank, op, True) for rank in range(comm.size)]
        wanted, _ = reference(op, parts, True)
        mine = in_replica(strategy, lambda context: context.reduce_scatter(op, parts[comm.rank], axis=axis))
        check(mine, np.array_split(wanted, comm.size, axis)[comm.rank], None, np.dtype(dtype))
        whole = in_replica(strategy, lambda context: context.all_gather(mine, axis=axis))
        check(whole, wanted, None, np.dtype(dtype))

    check_examples(comm, shape, check_one, st.sampled_from(NAMES), st.integers(0, 20), EXTENTS, st.integers(0, 2), SEEDS)


@up_to_ranks(8)
def test_every_replica_sends_to_every_other(comm, shape, strategy):
    def check_one(dtype: str, lengths: list[int], extents: list[int], root: int, number: int) -> None:
        def sent(source: int, target: int) -> np.ndarray:
            # as many rows as the two of them have it
            leaf = Leaf(dtype, (lengths[(source + 2 * target) % 8], *extents), "strided", number + target)
            return np.asarray(leaf.of(source, "SUM", False))

        everybody = range(comm.size)
        given = [sent(comm.rank, other) for other in everybody]
        found = in_replica(strategy, lambda context: context.all_to_all(given))
        assert all(array.flags.writeable for array in found)
        assert not any(np.shares_memory(one, other) for one, other in zip(found, given, strict=True))
        assert [array.tobytes() for array in found] == [sent(other, comm.rank).tobytes() for other in everybody]
        assert [array.shape for array in found] == [sent(other, comm.rank).shape for other in everybody]
        root %= comm.size
        of_root = in_replica(strategy, lambda context: context.broadcast({"a": sent(comm.rank, 0)}, root=root))
        assert (of_root["a"].shape, of_root["a"].tobytes()) == (sent(root, 0).shape, sent(root, 0).tobytes())
        assert (of_root["a"].dtype, of_root["a"].flags.writeable) == (dtype, True)

    check_examples(comm, shape, check_one, st.sampled_from(NAMES), LENGTHS, EXTENTS, st.integers(0, 7), SEEDS)


def test_a_weighted_mean_is_that_of_all_rows(comm, shape, strategy):
    def check_one(code: str, lengths: list[int], extents: list[int], number: int) -> None:
        lengths = [lengths[0] + 1, *lengths[1 : comm.size]]
        leaves = [Leaf(np.dtype(code).name, (length, *extents), "C", number) for length in lengths]
        parts = [leaf.of(rank, "SUM", True) for rank, leaf in enumerate(leaves)]
        mine = parts[comm.rank]
        with np.errstate(invalid="ignore"):
            mean = np.asarray(mine.sum(axis=0) / mine.dtype.type(len(mine)))  # NaN where there are no rows, with no weight
        found = in_replica(strategy, lambda context: context.all_reduce("mean", {"g": mean}, weight=len(mine)))["g"]
        wanted = np.concatenate(parts).astype(np.float64).mean(axis=0)
        assert found.dtype == mine.dtype
        assert np.allclose(found, wanted, rtol=0, atol=16 * comm.size * np.finfo(mine.dtype).eps), (found, wanted)

    check_examples(comm, shape, check_one, st.sampled_from("fd"), LENGTHS, EXTENTS, SEEDS)


@up_to_ranks(8)
def test_global_batches_are_the_same_at_any_number_of_replicas(comm, shape, strategy):
    def check_one(rows: int, batch: int, shuffle: bool, drop: bool, number: int) -> None:
        arrays = {"x": np.arange(2 * rows).reshape(rows, 2), "y": np.arange(rows, dtype=np.float32)}
        alone, shared = (
            mpistrat.ArrayDataset(arrays, batch, shuffle=shuffle, seed=number, drop_remainder=drop) for _ in range(2)
        )
        distributed = strategy.experimental_distribute_dataset(shared)
        for _ in range(2):
            found = [strategy.gather(step, axis=0) for step in distributed]
            wanted = list(alone)
            assert [{name: array.tolist() for name, array in step.items()} for step in found] == [
                {name: array.tolist() for name, array in step.items()} for step in wanted
            ]

    check_examples(comm, shape, check_one, st.integers(0, 40), st.integers(1, 17), st.booleans(), st.booleans(), SEEDS)
