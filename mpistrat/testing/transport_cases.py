"""Test cases of transports: inputs and expected results of each verb, for every dtype, operation and division. Pure.

The values give the same result in every order of summation: integers of any size, which wrap around, and small whole numbers as
floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import UnsupportedDtypeError
from mpistrat.reduction import ReduceOp, check_dtype, combine
from mpistrat.transports.base import Operation, Transport

DTYPES: tuple[np.dtype[Any], ...] = tuple(np.dtype(code) for code in "?bBhHiIqQfdFD")


VERBS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Case:
    """One verb on a buffer of `count` elements, of which ``bounds[r]:bounds[r + 1]`` are rank r's part."""

    verb: str
    dtype: np.dtype[Any]
    op: ReduceOp
    count: int
    bounds: Sequence[int]

    def bind(self, transport: Transport, buffer: Array) -> Operation:
        """Bind the verb to a buffer of a transport."""
        if self.verb == "all_reduce":
            return transport.all_reduce(buffer, self.op)
        if self.verb == "reduce_scatter":
            return transport.reduce_scatter(buffer, self.bounds, self.op)
        return transport.all_gather(buffer, self.bounds)

    def given(self, rank: int) -> slice:
        """Return the elements that `rank` contributes; the rest of its buffer is poisoned."""
        return self._part(rank) if self.verb == "all_gather" else slice(0, self.count)

    def promised(self, rank: int) -> slice:
        """Return the elements that `rank` may read afterwards."""
        return self._part(rank) if self.verb == "reduce_scatter" else slice(0, self.count)

    def expected(self, given: Array) -> Array:
        """Return the whole result; row r of `given` is the input of rank r."""
        if self.verb == "all_gather":
            return np.concatenate([row[self._part(rank)] for rank, row in enumerate(given)])
        total: Array = combine(self.op).reduce(given, axis=0, dtype=given.dtype)
        return total

    def _part(self, rank: int) -> slice:
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def __str__(self) -> str:
        bounds = "" if self.verb == "all_reduce" else f", bounds {list(self.bounds)}"
        return f"{self.verb}({self.count} x {self.dtype}, {self.op.name}{bounds})"


def operations(dtype: np.dtype[Any]) -> list[ReduceOp]:
    """Return the operations that are defined for a dtype."""
    defined = []
    for op in ReduceOp:
        try:
            check_dtype(op, dtype)
        except UnsupportedDtypeError:
            continue
        defined.append(op)
    return defined


def divisions(count: int, size: int) -> list[list[int]]:
    """Return bounds of all kinds: even, rising, all for the first rank, all for the last."""
    even = [rank * count // size for rank in range(size + 1)]
    rising = [count * rank * (rank + 1) // (size * (size + 1)) for rank in range(size + 1)]
    return [even, rising, [0, *[count] * size], [*[0] * size, count]]


def cases(dtype: np.dtype[Any], op: ReduceOp, count: int, size: int) -> Iterator[Case]:
    """Return each verb with every division."""
    even = divisions(count, size)[0]
    yield Case("all_reduce", dtype, op, count, even)
    for verb, bounds in product(("reduce_scatter", "all_gather"), divisions(count, size)):
        yield Case(verb, dtype, op, count, bounds)


def inputs(dtype: np.dtype[Any], op: ReduceOp, count: int, size: int, seed: int) -> Array:
    """Return one row of values per rank, the same on all ranks."""
    random = np.random.default_rng(seed)
    shape = (size, count)
    if dtype.kind == "b":
        # so that both results occur, even with many ranks
        rare = random.random(shape) < 1 / (size + 1)
        return rare if op in (ReduceOp.SUM, ReduceOp.MAX) else ~rare
    if dtype.kind in "iu":
        return np.frombuffer(random.bytes(size * count * dtype.itemsize), dtype).reshape(shape)
    if op is ReduceOp.PROD:
        factors = [1, -1, 2, 0.5] if dtype.kind == "f" else [1, 1j, -1, 1 + 1j]
        return np.array(factors, dtype)[random.integers(0, 4, shape)]
    values = random.integers(-9, 10, shape).astype(dtype)
    return values if dtype.kind == "f" else values + np.array(1j, dtype) * random.integers(-9, 10, shape).astype(dtype)


def poison(array: Array) -> None:
    """Fill an array with values that no result has: NaN, or a byte pattern that no test value has."""
    if array.dtype.kind in "fc":
        array.fill(np.nan)
    else:
        array.view(np.uint8).fill(0xA5)
