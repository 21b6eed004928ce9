"""ReduceOp: the reductions, and what each one does for each dtype.

======  =======  ==============  =======================  =============================  ========
op      bool     integers        float32, float64         float16, bfloat16              complex
======  =======  ==============  =======================  =============================  ========
SUM     refused  wraps around    IEEE sum                 summed in float32              sum
MEAN    refused  64 bits, trunc  SUM, then one division   the same in float32            the same
MIN     and      minimum         minimum, NaN wins        minimum, NaN wins              refused
MAX     or       maximum         maximum, NaN wins        maximum, NaN wins              refused
PROD    and      wraps around    product                  multiplied in float32          product
======  =======  ==============  =======================  =============================  ========
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError

Array = NDArray[Any]

HALF_DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# how NumPy warns is a variable of the context; entering a copy of this one is ten times as fast as `numpy.errstate`
QUIET = Context()
QUIET.run(np.seterr, all="ignore")

FOLD_COUNT = 1 << 15  # elements per block: the operands and the result of one block fit the cache of a core together
ACCEPTED = "bool, integers, float16, bfloat16, float32, float64 and complex numbers"


class ReduceOp(Enum):
    """How the components of a value are combined across replicas."""

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the operation for a member, or for a name in upper or lower case."""
        if isinstance(op, cls):
            return op
        member = (_MEMBERS.get(op) or _MEMBERS.get(op.upper())) if isinstance(op, str) else None
        if member is not None:
            return member
        accepted = ", ".join(member.name for member in cls)
        if not isinstance(op, str):
            raise TypeError(f"reduce_op must be a ReduceOp or a str, one of {accepted}; got {op!r}")
        raise InvalidArgumentError(f"unknown reduce_op {op!r}; accepted are {accepted}, in upper or lower case")

    @classmethod
    def from_variable_aggregation(cls, aggregation: Enum) -> ReduceOp:
        """Return the operation with the name of a variable's aggregation, SUM or MEAN."""
        name = getattr(aggregation, "name", "")
        if name not in ("SUM", "MEAN"):
            raise InvalidArgumentError(f"only VariableAggregation.SUM and MEAN have a reduce_op; got {aggregation!r}")
        return cls[name]


_MEMBERS = {**ReduceOp.__members__, **{name.lower(): op for name, op in ReduceOp.__members__.items()}}


def check_elements(dtype: np.dtype[Any], name: str = "value") -> None:
    """Check that collectives take arrays of `dtype`."""
    # 8-bit floats have the kind of a float, but NumPy does not count them as numbers, nor does MPI
    is_number = dtype.kind in "biufc" and issubclass(dtype.type, (np.number, np.bool_))
    if not is_number and dtype not in HALF_DTYPES:
        raise UnsupportedDtypeError(f"{name} has dtype {dtype}, which collectives do not support; accepted are {ACCEPTED}")
    if not dtype.isnative:
        raise UnsupportedDtypeError(f"{name} has non-native byte order ({dtype.str}); convert it with .astype({dtype.name!r})")


def check_dtype(op: ReduceOp, dtype: np.dtype[Any], name: str = "value") -> None:
    """Check that `op` is defined across replicas for `dtype`.

    Booleans have neither SUM nor MEAN, as in MPI and TensorFlow: in NumPy ``add`` is logical OR, and ``sum`` counts.
    """
    check_elements(dtype, name)
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.kind == "c":
        raise UnsupportedDtypeError(f"{op.name} is not defined for {name} of dtype {dtype}: complex numbers have no order")
    if op is ReduceOp.MEAN and dtype.kind == "b":
        raise UnsupportedDtypeError(f"MEAN is not defined for {name} of dtype bool; cast it to float32 first")
    if op is ReduceOp.SUM and dtype.kind == "b":
        raise UnsupportedDtypeError(
            f"SUM is not defined for {name} of dtype bool across replicas: it could mean a count, or logical OR. Use MAX for "
            "logical OR, MIN for logical AND, or to count cast it first, value.astype(np.int64)"
        )


def accumulation_dtype(op: ReduceOp, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which `op` combines values of `dtype`.

    It is float32 for 16-bit floats, 64 bits for the MEAN of integers, so that the sum does not wrap around, and else `dtype`.
    """
    if dtype in HALF_DTYPES:
        return np.dtype(np.float32)
    if op is ReduceOp.MEAN and dtype.kind in "iu":
        return np.dtype(np.int64 if dtype.kind == "i" else np.uint64)
    return dtype


_COMBINE: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
}


def combine(op: ReduceOp) -> np.ufunc:
    """Return the binary ufunc of `op`; that of MEAN is the sum, which is divided once, at the end."""
    return _COMBINE[op]


def quiet() -> Callable[..., Any]:
    """Return what calls a function so that an overflow is infinity, as for MPI, even if NumPy's warnings are errors.

    ``quiet()(function, *arguments)``. Arithmetic that raises on one rank would leave the others waiting. What is returned may
    be kept, for one thread at a time.
    """
    return QUIET.copy().run


def quiet_call(op: ReduceOp) -> Callable[..., Any]:
    """Return what calls ``combine(op)`` quietly, and in no more time: ``call(function, one, other, out)``, `out` or None."""
    # by its name `out` takes 40 ns more; NumPy wants it so for the minimum and the maximum, which never warn
    return _with_out if op in (ReduceOp.MIN, ReduceOp.MAX) else quiet()


def _with_out(function: np.ufunc, one: Array, other: Array, out: Array | None) -> Any:
    return function(one, other, out=out)


def divide(total: Array, count: int, out: Array) -> None:
    """Write `total` divided by `count` into `out`, which may be `total`, in its dtype; integers are truncated towards zero.

    It is called by steps, or by `quiet`.
    """
    if count == 1:
        if out is not total:
            out[...] = total
    elif total.dtype.kind in "iu":
        # integer arithmetic, because float64 does not hold every int64; floor division, corrected towards zero
        wide = total.astype(np.uint64 if total.dtype.kind == "u" else np.int64, copy=False)
        quotient, remainder = np.divmod(wide, wide.dtype.type(count))
        out[...] = quotient + ((remainder != 0) & (wide < 0))
    else:
        np.divide(total, total.dtype.type(count), out=out, casting="unsafe")


def divider(dtype: np.dtype[Any], count: int) -> Callable[[Array], object] | None:
    """Return what divides arrays of a dtype in place, as `divide` does; None if there is nothing to divide by."""
    if count == 1:
        return None
    run = quiet()
    if dtype.kind in "iu":
        return lambda total: run(divide, total, count, total)
    divisor = dtype.type(count)
    return lambda total: run(np.divide, total, divisor, total)


class Fold:
    """Combines several arrays into one in a single pass over memory, in blocks that fit the cache.

    16-bit floats are combined and divided in float32, and rounded once.
    """

    def __init__(self, op: ReduceOp, dtype: np.dtype[Any], divisor: int = 1) -> None:
        self.op, self.dtype, self.divisor, self.widens = op, dtype, divisor, dtype in HALF_DTYPES
        self._combine = combine(op)
        self._total, self._addend = (np.empty(FOLD_COUNT if self.widens else 0, np.float32) for _ in range(2))

    def into(self, target: Array, addends: Sequence[Array]) -> None:
        """Write the combination of two arrays or more, in their order, to `target`, which may be the first or the second."""
        if len(addends) == 2 and self.divisor == 1 and not self.widens:
            self._combine(addends[0], addends[1], out=target)
            return
        fold = self._fold_wide if self.widens else self._fold
        for start in range(0, target.size, FOLD_COUNT):
            block = slice(start, start + FOLD_COUNT)
            fold(target[block], [addend[block] for addend in addends])

    def _fold(self, target: Array, addends: Sequence[Array]) -> None:
        total = addends[0]
        for addend in addends[1:]:
            self._combine(total, addend, out=target)
            total = target
        if self.divisor > 1:
            divide(target, self.divisor, out=target)

    def _fold_wide(self, target: Array, addends: Sequence[Array]) -> None:
        total, wide = self._total[: target.size], self._addend[: target.size]
        np.copyto(total, addends[0])
        for addend in addends[1:]:
            np.copyto(wide, addend)
            self._combine(total, wide, out=total)
        if self.divisor > 1:
            divide(total, self.divisor, out=total)
        np.copyto(target, total, casting="unsafe")
