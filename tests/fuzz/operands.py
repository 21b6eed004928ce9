"""Operands of random calls: arrays in any layout, targets that overlap with them, and what NumPy makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mpistrat.experimental import CommunicationOptions
from tests.reference import DTYPES, LAYOUTS, NO_OPS, check, of_verb, random_values, read_only, unaligned

OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")


_LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **LAYOUTS,
    "unaligned": unaligned,
    "one value": lambda array: np.broadcast_to(array[(slice(1),) * array.ndim], array.shape) if array.size else array,
    # of Python, where one has this dtype
    "number": lambda array: array.item() if not array.shape and np.asarray(array.item()).dtype == array.dtype else array,
}
_USUAL = 0.6  # how many arrays are plain ones


class Operand:
    """An array of every rank, in the layout that was drawn; `array` is that of this rank."""

    def __init__(self, rng: np.random.Generator, op: str, rank: int, shape: tuple[int, ...] | None = None) -> None:
        dtypes = [dtype for dtype in DTYPES if op not in NO_OPS.get(dtype.kind, ())]
        self.op, self.rank, self.seed = op, rank, int(rng.integers(2**31))
        self.dtype = np.dtype(np.float32) if rng.random() < 0.4 else dtypes[rng.integers(len(dtypes))]
        self.shape = _shape(rng) if shape is None else shape
        self.layout = "C" if rng.random() < _USUAL else str(rng.choice(sorted(_LAYOUTS)))
        # the mean of float16's largest is finite, but for what half-width messages round
        overflows = op == "SUM" or (op == "MEAN" and self.dtype.itemsize > 2)
        self.is_huge = self.dtype.kind == "f" and overflows and rng.random() < 0.05
        self.is_exact = True  # whether every order of combining makes the same bits
        self._stretched: tuple[int, Sequence[int]] | None = None
        self.array = self.part(rank)
        self.shape = np.shape(self.array)  # Fortran's arrays have an axis

    def stretch(self, axis: int, lengths: Sequence[int]) -> None:
        """Give the array of each rank a length of its own along an axis."""
        self._stretched = axis, lengths
        self.array = self.part(self.rank)
        self.shape = self.array.shape

    def part(self, rank: int) -> np.ndarray:
        rng, shape = np.random.default_rng((self.seed, rank)), list(self.shape)
        if self._stretched:
            axis, lengths = self._stretched
            shape[axis] = lengths[rank]
        with np.errstate(all="ignore"):
            if self.is_huge:
                largest = np.finfo(self.dtype).max if self.dtype.kind == "f" else 1
                return _LAYOUTS[self.layout](np.full(shape, largest, self.dtype))
            return _LAYOUTS[self.layout](np.array(random_values(rng, self.dtype, shape, self.op, self.is_exact)))

    def renew(self) -> None:
        """Give the same array new values, where it can be written to."""
        self.seed += 1
        if isinstance(self.array, np.ndarray) and self.array.flags.writeable:
            self.array[...] = self.part(self.rank)
        else:
            self.array = self.part(self.rank)

    def snapshot(self) -> bytes:
        return np.asarray(self.array).tobytes()

    def after(self, verb: str, place: Any, size: int, rank: int) -> tuple[Any, np.ndarray | None]:
        """Return what a rank has after a verb, and by how much it may differ."""
        parts = [np.asarray(self.part(each)) for each in range(size)]
        with np.errstate(all="ignore"):
            return of_verb(verb, parts, place, rank, self.op if VERBS[verb].reduces else "", self.is_exact)

    def check(self, found: Any, size: int, verb: str = "all_reduce", place: Any = None, rank: int = 0) -> None:
        """Check what it has become on a rank; what is not reduced comes bit by bit."""
        wanted, bound = self.after(verb, place, size, rank)
        check(np.asarray(found), wanted, bound, self.dtype)
        assert VERBS[verb].reduces or np.asarray(found).tobytes() == wanted.tobytes(), f"other bits: {self}"

    def __repr__(self) -> str:
        kind = " huge" if self.is_huge else "" if self.is_exact else " inexact"
        return f"{self.dtype.name} {self.shape} {self.layout}{kind}"


def _shape(rng: np.random.Generator) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.08:
        return ()
    if kind < 0.14:
        return tuple(int(extent) for extent in rng.permutation([0, rng.integers(1, 4)])[: rng.integers(1, 3)]) or (0,)
    if kind < 0.5:
        return tuple(int(extent) for extent in rng.integers(1, 7, rng.integers(1, 4)))
    if kind < 0.8:
        return (int(rng.integers(1, 600)),)
    if kind < 0.97:
        return (int(rng.integers(600, 40_000)),)
    return (int(rng.integers(40_000, 400_000)),)


class Operands(list[Operand]):
    """One to four operands, which may be passed as a list."""

    def __init__(self, rng: np.random.Generator, op: str, rank: int) -> None:
        self.is_list = rng.random() < 0.5
        shape = _shape(rng) if rng.random() < 0.3 else None  # equal shapes can be targets of one another
        super().__init__(Operand(rng, op, rank, shape) for _ in range(int(rng.integers(1, 5)) if self.is_list else 1))

    def passed(self, arrays: Sequence[Any] | None = None) -> Any:
        """Return what is passed to a call: the arrays of this rank, or others."""
        given = [operand.array for operand in self] if arrays is None else list(arrays)
        return given if self.is_list else given[0]

    def results(self, found: Any) -> list[Any]:
        """Return the result of each from what a call returned."""
        return list(found) if self.is_list else [found]

    def renew(self) -> None:
        for operand in self:
            operand.renew()

    def stretch(self, axis: int, lengths: Sequence[int]) -> None:
        for operand in self:
            operand.stretch(axis, lengths)

    def be_inexact(self) -> None:
        """Have values whose combination is rounded, as the order has it."""
        for operand in self:
            operand.is_exact = operand.is_huge
        self.renew()

    def snapshot(self) -> list[bytes]:
        return [operand.snapshot() for operand in self]

    def check_unchanged(self, before: Sequence[bytes], targets: Sequence[np.ndarray] | None) -> None:
        """Fail if an argument was changed that is no target."""
        for operand, bytes_before in zip(self, before, strict=True):
            if not overlaps(np.asarray(operand.array), targets):
                assert operand.snapshot() == bytes_before, f"an argument was changed: {operand}"

    def __repr__(self) -> str:
        return f"{super().__repr__()} list={self.is_list}"


OWN_TARGETS = ("same", "same", "others")  # the arrays themselves


def draw_targets(
    rng: np.random.Generator, operands: Operands, shapes: Sequence[tuple[int, ...]], kinds: Sequence[str]
) -> tuple[str, list[np.ndarray] | None]:
    """Return how targets of these shapes were drawn, and the targets, which may be refused; None where there are none."""
    kind = str(rng.choice(["none", "none", *kinds]))
    order = rng.permutation(len(operands)) if kind == "others" else range(len(operands))
    if kind == "none":
        return kind, None
    if kind in OWN_TARGETS:
        return kind, [operands[index].array for index in order]
    if kind in CHANGED:
        return kind, [CHANGED[kind](np.zeros(shape, operand.dtype)) for operand, shape in zip(operands, shapes, strict=True)]
    # a target overlaps with its own operand, or with the next one of a list
    moved = [operands[(index + (kind == "next")) % len(operands)] for index in order]
    return kind, [
        _overlapping(each, shape) if each.dtype == operand.dtype else np.zeros(shape, operand.dtype)
        for each, operand, shape in zip(moved, operands, shapes, strict=True)
    ]


def _overlapping(operand: Operand, shape: tuple[int, ...]) -> np.ndarray:
    """Move an operand to where it overlaps with a target of a shape, which is one element before its end."""
    count, size = int(np.prod(shape)), int(np.prod(operand.shape))
    memory = np.zeros(max(size, count) + 1, operand.dtype)
    source = memory[memory.size - size :].reshape(operand.shape)
    operand.layout = "C"
    source[...] = operand.part(operand.rank)
    operand.array = source
    return memory[:count].reshape(shape)


CHANGED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fresh": lambda array: array,
    "unaligned": unaligned,
    "read-only": read_only,
    "strided": lambda array: np.zeros((*array.shape, 2), array.dtype)[..., 0],
    "shape": lambda array: np.zeros((*array.shape, 1), array.dtype),
    "dtype": lambda array: np.zeros(array.shape, np.complex64 if array.dtype == np.float32 else np.float32),
}


@dataclass(frozen=True)
class Verb:
    """A collective of arrays, which gives each rank an array for each that it passes."""

    reduces: bool  # whether it is told an operation
    place: str  # what it is told of where: an axis, a root, or nothing
    targets: Sequence[str]  # kinds of `out`, which all ranks must refuse, or none


VERBS = {
    "all_reduce": Verb(True, "", (*OWN_TARGETS, "shifted", *CHANGED)),
    "reduce_scatter": Verb(True, "axis", ("fresh", "shifted", "next")),
    "all_gather": Verb(False, "axis", ("shifted", "next", *CHANGED)),
    "broadcast": Verb(False, "root", (*OWN_TARGETS, "shifted", *CHANGED)),
}


def is_refused(targets: Sequence[Any] | None, operands: Operands, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether a verb must refuse these targets for results of these shapes."""
    return targets is not None and any(
        not (isinstance(target, np.ndarray) and target.flags.carray) or (target.shape, target.dtype) != (shape, operand.dtype)
        for target, operand, shape in zip(targets, operands, shapes, strict=True)
    )


def overlaps(array: np.ndarray, targets: Sequence[np.ndarray] | None) -> bool:
    """Return whether an array is, or overlaps with, one of the targets."""
    return any(np.may_share_memory(array, target) for target in targets or ())


def told(options: CommunicationOptions | None) -> str:
    """Return the fields of options that are set."""
    usual = CommunicationOptions()
    return ", ".join(
        f"{field.name}={getattr(options, field.name)!r}"
        for field in (fields(options) if options else ())
        if getattr(options, field.name) != getattr(usual, field.name)
    )
