"""Case: what a kind is handed: the calls it can make, which know what they should return, and which rank is the odd one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
import numpy as np
import optree

import mpistrat
from tests.disagreements.memory import Memory

T = TypeVar("T")

WARM_ROUNDS = 20
_CHECKED_WHILE_WARMING = 50_000  # larger results are looked at in the disagreement only


@dataclass(frozen=True)
class Plan:
    """Which case it is: what whoever runs the job sends to the ranks."""

    kind: str  # name of a function in `kinds`
    count: int  # elements of an array of ordinary size
    warm: bool  # whether the calls are made several times before without an odd rank
    odd: int  # the odd rank
    seed: int = 0  # for kinds that draw what they do

    def __str__(self) -> str:
        seed = f" seed {self.seed}" if self.seed else ""
        return f"{self.kind} {self.count} {'warm' if self.warm else 'first'}{seed}, odd rank {self.odd}"


class Case:
    """One rank's view of a case. Arrays hold small whole numbers that differ by rank, place and call: sums are exact."""

    def __init__(
        self, plan: Plan, rank: int, size: int, memory: Memory, strategy: Any, note: Callable[[str], None] = lambda text: None
    ) -> None:
        self.plan, self.count, self.seed = plan, plan.count, plan.seed
        self.rank, self.size, self.memory, self.strategy = rank, size, memory, strategy
        self.odd: int | None = None
        self.turn = 0  # counts calls: what belongs to another one has other values
        self.values: list[str] = []
        self.kept: list[Any] = []
        self.note = note
        self.must_be_told = False  # even where no result is wrong

    @property
    def is_odd(self) -> bool:
        """Whether this rank does something else than the others."""
        return self.rank == self.odd

    def pick(self, usual: T, odd: T) -> T:
        """Return what this rank takes."""
        return odd if self.is_odd else usual

    def in_step(self, calls: Callable[[], object]) -> None:
        """Make calls without an odd rank, several times."""
        odd, self.odd = self.odd, None
        for _ in range(WARM_ROUNDS):
            self.memory.reset()
            calls()
        self.memory.reset()
        self.odd = odd

    def operand(self, shape: int | Sequence[int] | None = None, dtype: Any = "float64", **place: int) -> np.ndarray:
        """Return this rank's array for the next call, between canaries."""
        shape = self.count if shape is None else shape
        array = self.memory.array(shape, dtype, **place)
        self.fill(array)
        if self.odd is not None:
            self.memory.seal(array)
        return array

    def fill(self, array: np.ndarray) -> None:
        """Fill an array with this rank's values for the next call."""
        array[...] = self.component(self.rank, array.shape, array.dtype)

    def component(self, rank: int, shape: int | Sequence[int], dtype: Any) -> np.ndarray:
        """Return what a rank hands to the next call, of this shape."""
        places = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape) % 5 + 1
        return ((rank + 1) * places + self.turn % 16).astype(dtype)

    def total(self, op: str, shape: int | Sequence[int], dtype: Any) -> np.ndarray:
        """Return what the next call of a reduction returns if all ranks make it as this one does."""
        parts = [self.component(rank, shape, np.float64) for rank in range(self.size)]
        function = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]
        total = function.reduce(parts)
        kind = np.dtype(dtype)
        if op == "mean":
            total = total // self.size if kind.kind in "iu" else total / self.size
        return total.astype(kind)

    def run(self, call: Callable[[Any], T]) -> T:
        """Call a function of the replica context in ``strategy.run``, and return what it returned."""
        returned: list[T] = []

        def step() -> None:
            returned.append(call(mpistrat.get_replica_context()))

        self.strategy.run(step)
        return returned[0]

    def look(self, call: str, result: Any, expected: Callable[[], Any]) -> None:
        """Note whether a result is right, and that the next call follows."""
        if self.odd is not None or self.count <= _CHECKED_WHILE_WARMING:
            self.values.append(f"{call} {'right' if _equal(result, expected()) else 'wrong'}")
        self.turn += 1

    def all_reduce(self, op: str, value: Any, **options: Any) -> None:
        """Reduce a nest of operands, and look at what comes back."""
        self.look("all_reduce", self.run(lambda context: context.all_reduce(op, value, **options)), self.totals(op, value))

    def totals(self, op: str, value: Any) -> Callable[[], Any]:
        """Return what gives the totals of a nest of operands of the next call."""
        turn = self.turn

        def expected() -> Any:
            now, self.turn = self.turn, turn
            try:
                return optree.tree_map(lambda leaf: self.total(op, leaf.shape, leaf.dtype), value)
            finally:
                self.turn = now

        return expected

    def start(self, op: str, value: Any, options: Any = None) -> tuple[Any, Callable[[], Any]]:
        """Start a reduction; hand what is returned to `wait`."""
        handle = self.run(lambda context: context.start_all_reduce(op, value, options))
        expected = self.totals(op, value)
        self.turn += 1
        return handle, expected

    def wait(self, started: tuple[Any, Callable[[], Any]]) -> None:
        """Wait for what was started, and look at it."""
        handle, expected = started
        self.look("wait", handle.wait(), expected)

    def all_gather(self, array: np.ndarray, axis: int = 0) -> None:
        """Gather operands of one shape."""
        result = self.run(lambda context: context.all_gather(array, axis))
        self.look("all_gather", result, lambda: np.concatenate(self._all(array), axis))

    def gather(self, array: np.ndarray, axis: int = 0) -> None:
        """Gather outside ``strategy.run``."""
        result = self.strategy.gather(self.per_replica(array), axis)
        self.look("gather", result, lambda: np.concatenate(self._all(array), axis))

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Get an operand of a root."""
        result = self.run(lambda context: context.broadcast(array, root))
        self.look("broadcast", result, lambda: self._all(array)[root])

    def reduce_scatter(self, op: str, array: np.ndarray, axis: int = 0, options: Any = None) -> None:
        """Get this rank's part of a reduction."""
        result = self.run(lambda context: context.reduce_scatter(op, array, axis, options))
        expected = self.totals(op, array)
        self.look("reduce_scatter", result, lambda: np.array_split(expected(), self.size, axis)[self.rank])

    def all_to_all(self, array: np.ndarray) -> None:
        """Send the same operand to every rank."""
        result = self.run(lambda context: context.all_to_all([array] * self.size))
        self.look("all_to_all", result, lambda: self._all(array))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.run(lambda context: context.barrier())
        self.turn += 1

    def reduce(self, op: str, array: np.ndarray, axis: int | None = None) -> None:
        """Reduce outside ``strategy.run``."""
        result = self.strategy.reduce(op, self.per_replica(array), axis=axis)
        expected = self.totals(op, array)
        self.look("reduce", result, lambda: expected() if axis is None else expected().sum(axis))

    def per_replica(self, array: np.ndarray) -> Any:
        """Return an array as the component of this rank."""
        return self.strategy.run(lambda: array)

    def variable(self, initial: np.ndarray, **arguments: Any) -> Any:
        """Make a variable, and look whether it holds the value of rank 0."""
        with self.strategy.scope():
            made = mpistrat.Variable(initial, **arguments)
        value = made.numpy() if arguments.get("synchronization") is None else None
        self.look("variable", value, lambda: None if value is None else self._all(initial)[0])
        self.kept.append(made)
        return made

    def _all(self, array: np.ndarray) -> list[np.ndarray]:
        return [self.component(rank, array.shape, array.dtype) for rank in range(self.size)]


def _equal(result: Any, expected: Any) -> bool:
    results, structure = optree.tree_flatten(result)
    wanted, wanted_structure = optree.tree_flatten(expected)
    return structure == wanted_structure and all(map(_same, results, wanted))


def _same(result: Any, wanted: np.ndarray) -> bool:
    array = np.asarray(result)
    if array.shape != wanted.shape or array.dtype != wanted.dtype:
        return False
    if wanted.dtype.kind in "biu":
        return bool((array == wanted).all())
    tolerance = 2e-2 if wanted.dtype.itemsize == 2 else 1e-6
    with np.errstate(all="ignore"):
        return bool(np.allclose(array.astype(np.float64), wanted.astype(np.float64), tolerance, 0))
