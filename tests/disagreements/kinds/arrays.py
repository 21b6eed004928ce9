"""One rank hands another array to the same call: of another length, dtype or shape."""

from __future__ import annotations

import numpy as np

from tests.disagreements.case import Case
from tests.disagreements.kinds.registry import LARGE, MAY_BE_RIGHT, kind


def _length(case: Case, odd: int) -> None:
    case.all_reduce("sum", case.operand(case.pick(case.count, odd)))


@kind("length", sizes=LARGE)
def shorter(case: Case) -> None:
    """One rank's array is a fifth shorter."""
    _length(case, case.count - max(1, case.count // 5))


@kind("length")
def longer_by_one(case: Case) -> None:
    """One rank's array has one element more."""
    _length(case, case.count + 1)


@kind("length", sizes=LARGE)
def longer(case: Case) -> None:
    """One rank's array is a fifth longer."""
    _length(case, case.count + max(1, case.count // 5))


@kind("length", sizes=LARGE)
def twice_as_long(case: Case) -> None:
    """One rank's array is twice as long."""
    _length(case, 2 * case.count)


@kind("length")
def all_others_longer(case: Case) -> None:
    """All ranks but one have an array that is a fifth longer."""
    longer_one = case.count + max(1, case.count // 5)
    case.all_reduce("sum", case.operand(longer_one if case.odd is not None and not case.is_odd else case.count))


@kind("length")
def longer_out(case: Case) -> None:
    """One rank's array is a fifth longer, and the result goes into memory of the caller."""
    from mpistrat.reduction import ReduceOp

    count = case.pick(case.count, case.count + max(1, case.count // 5))
    operand, target = case.operand(count), case.memory.array(count, "float64")
    case.strategy.extended.communicator.all_reduce(ReduceOp.SUM, [operand], out=[target])
    case.look("all_reduce out", target, case.totals("sum", operand))


@kind("length")
def empty(case: Case) -> None:
    """One rank's array is empty."""
    _length(case, 0)


@kind("shape", sizes=(1,))
def scalar(case: Case) -> None:
    """One rank passes a scalar, the others an array of one element."""
    case.all_reduce("sum", case.operand(case.pick((1,), ())))


@kind("shape")
def column(case: Case) -> None:
    """One rank's array has as many elements, in two axes."""
    case.all_reduce("sum", case.operand(case.pick((case.count,), (case.count, 1))))


@kind("shape")
def transposed(case: Case) -> None:
    """One rank's array is transposed."""
    rows = max(case.count // 2, 1)
    case.all_reduce("sum", case.operand(case.pick((2, rows), (rows, 2))))


def _dtype(case: Case, usual: str, odd: str, op: str = "sum") -> None:
    case.all_reduce(op, case.operand(dtype=case.pick(usual, odd)))


@kind("dtype", sizes=LARGE)
def dtype_int32(case: Case) -> None:
    """One rank has int32, the others float32."""
    _dtype(case, "float32", "int32")


@kind("dtype")
def dtype_int64(case: Case) -> None:
    """One rank has int64, the others float64."""
    _dtype(case, "float64", "int64")


@kind("dtype")
def dtype_wider(case: Case) -> None:
    """One rank has float64, the others float32."""
    _dtype(case, "float32", "float64")


@kind("dtype")
def dtype_half(case: Case) -> None:
    """One rank has bfloat16, the others float16."""
    _dtype(case, "float16", "bfloat16")


@kind("dtype")
def dtype_unsigned(case: Case) -> None:
    """One rank has uint8, the others int8, and the largest is asked for."""
    _dtype(case, "int8", "uint8", "max")


@kind("dtype")
def dtype_same_bytes(case: Case) -> None:
    """One rank has half as many elements of float64, the others float32: as many bytes."""
    case.all_reduce("sum", case.operand(case.pick(2 * case.count, case.count), case.pick("float32", "float64")))


@kind("dtype", allowed=MAY_BE_RIGHT)
def dtype_big_endian(case: Case) -> None:
    """One rank has float64 in the other byte order."""
    operand = case.operand()
    turned = np.ascontiguousarray(operand.astype(">f8")) if case.is_odd else operand
    result = case.run(lambda context: context.all_reduce("sum", turned))
    case.look("all_reduce", np.asarray(result, np.float64), case.totals("sum", operand))
