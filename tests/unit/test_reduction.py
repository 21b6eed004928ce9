"""Reductions: names, what is defined for which dtype, and a division that truncates; what they compute `tests.fuzz` tries."""

from fractions import Fraction
from math import trunc
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat
from mpistrat.device.kernels import fold_kernel
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype, combine, divide
from mpistrat.transports import mpi
from mpistrat.transports.nccl_bindings import native_type, nccl_refusal

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INTEGERS = [np.dtype(code) for code in "bBhHiIqQ"]
FLOATS = [np.dtype(np.float32), np.dtype(np.float64)]
HALVES = [np.dtype(np.float16), BFLOAT16]
COMPLEX = [np.dtype(np.complex64), np.dtype(np.complex128)]
BOOL = np.dtype(bool)


def test_an_unknown_operation_lists_the_known_and_variables_have_those_of_their_aggregation():
    with pytest.raises(
        InvalidArgumentError, match="unknown reduce_op 'median'; accepted are SUM, MEAN, MIN, MAX, PROD, in upper or lower case"
    ):
        ReduceOp.parse("median")
    with pytest.raises(TypeError, match=r"must be a ReduceOp or a str, one of SUM, MEAN, MIN, MAX, PROD; got 3"):
        ReduceOp.parse(3)
    aggregation = mpistrat.VariableAggregation
    for name in ("SUM", "MEAN"):
        assert ReduceOp.from_variable_aggregation(aggregation[name]) is ReduceOp[name]
    for refused in (aggregation.NONE, aggregation.ONLY_FIRST_REPLICA, "SUM"):
        with pytest.raises(ValueError, match=r"only VariableAggregation.SUM and MEAN have a reduce_op; got .+"):
            ReduceOp.from_variable_aggregation(refused)


@pytest.mark.parametrize("dtype", [BOOL, *INTEGERS, *FLOATS, *HALVES, *COMPLEX], ids=str)
@pytest.mark.parametrize("op", ReduceOp)
def test_operations_are_defined_as_the_table_says(op, dtype):
    refused = op in {"b": (ReduceOp.SUM, ReduceOp.MEAN), "c": (ReduceOp.MIN, ReduceOp.MAX)}.get(dtype.kind, ())
    if refused:
        with pytest.raises(UnsupportedDtypeError, match=rf"{op.name} is not defined for gradient 3 of dtype {dtype.name}"):
            check_dtype(op, dtype, "gradient 3")
    else:
        check_dtype(op, dtype)


@pytest.mark.parametrize("op", ReduceOp)
def test_all_that_combine_know_an_operation_which_is_known_by_member_and_by_name(op, monkeypatch):
    names = {name: name for name in ("LAND", "LOR", "SUM", "MIN", "MAX", "PROD")}
    monkeypatch.setattr(mpi, "MPI", SimpleNamespace(**names))
    monkeypatch.setattr(mpi, "_ufunc_op", lambda ufunc, dtype: ufunc.__name__)
    for dtype in (BOOL, *INTEGERS, *FLOATS, *HALVES, *COMPLEX):
        try:
            check_dtype(op, dtype)
        except UnsupportedDtypeError:
            continue
        assert isinstance(combine(op), np.ufunc)
        assert fold_kernel(dtype, op)
        assert bool(native_type(dtype, op)) == (nccl_refusal(dtype, op) == "")
        assert dtype in HALVES or mpi.mpi_op(op, dtype)
    assert {ReduceOp.parse(name) for name in (op, op.name, op.name.lower(), op.name.title())} == {op}


ACCEPTED = "which collectives do not support; accepted are bool, integers, float16, bfloat16, float32, float64 and complex n"
FOREIGN = r"x has non-native byte order \({}\); convert it with .astype\('{}'\)"
REFUSED = dict.fromkeys(("O", "U3", "S3", "M8[s]", "m8[s]", "f4,i4", "V3", ml_dtypes.float8_e5m2), ACCEPTED)
REFUSED |= {code: FOREIGN.format(code, np.dtype(code).name) for code in (">f4", ">i8", ">c16")}


@pytest.mark.parametrize("code", REFUSED)
def test_what_is_no_number_of_this_machine_is_refused_with_what_is_accepted_or_the_remedy(code):
    with pytest.raises(UnsupportedDtypeError, match=REFUSED[code]):
        check_dtype(ReduceOp.SUM, np.dtype(code), "x")


def test_halves_are_combined_in_float32_and_all_else_as_it_is():
    for op in ReduceOp:
        assert {accumulation_dtype(op, dtype) for dtype in HALVES} == {np.dtype(np.float32)}
        assert all(accumulation_dtype(op, dtype) == dtype for dtype in [BOOL, *FLOATS, *COMPLEX])
        wide = {"i": np.dtype(np.int64), "u": np.dtype(np.uint64)}
        for dtype in INTEGERS:
            assert accumulation_dtype(op, dtype) == (wide[dtype.kind] if op is ReduceOp.MEAN else dtype)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@given(data=st.data(), count=st.integers(1, 1000))
def test_integers_are_divided_towards_zero(dtype, data, count):
    limits = np.iinfo(dtype)
    values = data.draw(st.lists(st.integers(int(limits.min), int(limits.max)), min_size=1, max_size=8))
    total = np.array([*values, limits.min, limits.max, 0], dtype)
    out = np.full_like(total, 77)
    expected = [trunc(Fraction(int(value), count)) for value in total]
    divide(total, count, out)
    assert out.tolist() == expected
    divide(total, count, total)
    assert total.tolist() == expected, "in place"
