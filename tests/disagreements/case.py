"""Case: where a rank makes calls: its arrays, what they should become, and which ranks are the odd ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
import numpy as np
import optree

from tests.disagreements.memory import Memory

_CHECKED_WHILE_WARMING = 50_000  # larger results are looked at in the disagreement only
_FUNCTIONS = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


@dataclass(frozen=True)
class Plan:
    """Which case it is: what whoever runs the job sends to the ranks."""

    kind: str  # of `kinds.KINDS`
    count: int  # elements of an array of ordinary size
    warm: bool  # whether the calls are made several times before without an odd rank
    odd: tuple[int, ...]  # the odd ranks
    seed: int = 0  # for kinds that draw what they do

    def __str__(self) -> str:
        seed = f" seed {self.seed}" if self.seed else ""
        ranks = f"rank{'s' * (len(self.odd) > 1)} {', '.join(map(str, self.odd))}"
        return f"{self.kind} {self.count} {'warm' if self.warm else 'first'}{seed}, odd {ranks}"


class Case:
    """One rank's view of a case. Arrays hold small whole numbers that differ by rank, place and call: sums are exact."""

    def __init__(self, plan: Plan, rank: int, size: int, memory: Memory, strategy: Any) -> None:
        self.plan, self.rank, self.size, self.memory = plan, rank, size, memory
        self.odd: tuple[int, ...] = ()  # while all make the same calls there is none
        self.turn = 0  # counts calls: what belongs to another one has other values
        self.values: list[str] = []
        self.kept: list[Any] = []  # lives until the next case
        self.calls: Sequence[Any] = ()  # the call that each rank makes now
        self.strategies, self.variables, self.started = [strategy], list[Any](), list[Any]()

    def play(self, usual: Sequence[Any], odd: Sequence[Any], make: Callable[[Case, Any], None]) -> None:
        self.kept += [*self.strategies[1:], *self.variables]
        self.strategies, self.variables = self.strategies[:1], []
        mine = odd if self.rank in self.odd else usual
        for index, call in enumerate(mine):
            is_aligned = len(usual) == len(odd)
            self.calls = [(odd if rank in self.odd else usual)[index] if is_aligned else call for rank in range(self.size)]
            make(self, call)

    def operand(self, shape: Sequence[int], dtype: Any, layout: str = "") -> Any:
        """Return this rank's array for the next call, between canaries, as it is to lie in memory."""
        if layout == "strided":
            array = self.memory.array((2 * shape[0], *shape[1:]), dtype)[::2]
        else:
            array = self.memory.array(shape, dtype, misaligned=layout == "misaligned")
        self.fill(array)
        if self.odd and array.flags.c_contiguous:
            self.memory.seal(array)
        if layout == "read_only":
            array.flags.writeable = False
        if layout == "big_endian":
            return array.astype(array.dtype.newbyteorder(">"))
        return array.item() if layout == "number" else array

    def fill(self, array: np.ndarray) -> None:
        array[...] = self.component(self.rank, array.shape, array.dtype)

    def component(self, rank: int, shape: Sequence[int], dtype: Any, turn: int | None = None) -> np.ndarray:
        """Return what a rank hands to the next call, of this shape."""
        places = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape) % 5 + 1
        return ((rank + 1) * places + (self.turn if turn is None else turn) % 16).astype(dtype)

    def totals(self, op: str, value: Any) -> Callable[[], Any]:
        """Return what gives the totals of a nest of operands of the next call, if all ranks make it as this one does."""
        turn = self.turn

        def total(leaf: Any) -> np.ndarray:
            array = np.asarray(leaf)
            dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
            found = _FUNCTIONS[op].reduce([self.component(rank, array.shape, np.float64, turn) for rank in range(self.size)])
            if op == "mean":
                found = found // self.size if dtype.kind in "iu" else found / self.size
            return np.asarray(found).astype(dtype)

        return lambda: optree.tree_map(total, value)

    def look(self, call: str, result: Any, expected: Callable[[], Any]) -> None:
        if self.odd or self.plan.count <= _CHECKED_WHILE_WARMING:
            self.values.append(f"{call} {'right' if _equal(result, expected()) else 'wrong'}")


def _equal(result: Any, expected: Any) -> bool:
    results, structure = optree.tree_flatten(result)
    wanted, wanted_structure = optree.tree_flatten(expected)
    return structure == wanted_structure and all(map(_same, results, wanted))


def _same(result: Any, wanted: np.ndarray) -> bool:
    array = np.asarray(result)
    if array.shape != wanted.shape or array.dtype.newbyteorder("=") != wanted.dtype:
        return False
    if wanted.dtype.kind in "biu":
        return bool((array == wanted).all())
    tolerance = 2e-2 if wanted.dtype.itemsize == 2 else 1e-6
    with np.errstate(all="ignore"):
        return bool(np.allclose(array.astype(np.float64), wanted.astype(np.float64), tolerance, 0))
