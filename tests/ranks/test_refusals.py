"""Calls of a communicator that are wrong, or differ between ranks: every rank raises, and the next call works."""

import re
from contextlib import contextmanager

import numpy as np
import pytest

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import AgreementError, InvalidArgumentError, TransportError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp
from tests.launches import needs_ranks, up_to_ranks
from tests.ranks.cases import case

SUM, MEAN, MAX = ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX
ONE, ROWS = np.ones(3, np.float32), np.ones((2, 3))


@contextmanager
def refused(ops, what, error, message):
    """Check that a call raises an error, and that the next one works; `what` is named if not."""
    with case(what):
        with pytest.raises(error, match=message):
            yield
        assert ops.all_reduce(SUM, [np.array([ops.rank])])[0] == sum(range(ops.size))


# what rank 1 calls, by what all are told of it
OTHER_CALLS = {
    "all_reduce(SUM, [float64 (3,)": lambda ops: ops.all_reduce(SUM, [np.ones(3)]),
    "all_reduce(SUM, [float32 (3, 1)": lambda ops: ops.all_reduce(SUM, [np.ones((3, 1), np.float32)]),
    "all_reduce(MAX, [float32 (3,)": lambda ops: ops.all_reduce(MAX, [ONE]),
    "all_reduce(SUM, [float32 (3,), float32 (3,)": lambda ops: ops.all_reduce(SUM, [ONE, ONE]),
    "algorithm=flat": lambda ops: ops.all_reduce(SUM, [ONE], CommunicationOptions(algorithm="flat")),
    "bytes_per_pack=1": lambda ops: ops.all_reduce(SUM, [ONE], CommunicationOptions(bytes_per_pack=1)),
    "deterministic=True": lambda ops: ops.all_reduce(SUM, [ONE], CommunicationOptions(deterministic=True)),
    "wire_dtype=bfloat16": lambda ops: ops.all_reduce(SUM, [ONE], CommunicationOptions(wire_dtype="bfloat16")),
    "barrier(": lambda ops: ops.barrier(),
    "all_gather(": lambda ops: ops.all_gather(ONE),
    "broadcast(": lambda ops: ops.broadcast(ONE),
}


@up_to_ranks(8)
@needs_ranks(2)
def test_ranks_that_make_different_calls_all_raise(mixed):
    for told, other in OTHER_CALLS.items():
        message = rf"(?s)ranks made different calls.*rank 1: .*{re.escape(told)}.*\nEvery rank must make the same"
        with refused(mixed, told, AgreementError, message):
            other(mixed) if mixed.rank == 1 else mixed.all_reduce(SUM, [ONE])


INVALID, UNSUPPORTED = InvalidArgumentError, UnsupportedDtypeError
NO_DTYPE, NO_ROOT = "which collectives do not support", r"root must be one of 0 to \d; got "
NO_AXES = r"needs arrays with at least one axis; got a scalar: pass x.reshape\(1\)"
NO_AXIS = "axis {} is out of range for an array of "
NO_OUT = r"out must be a writable, C-contiguous float32 array of shape \(3,\); got float32 \(4,\)"


class _RaisesOfItsOwn:
    """A value of another library, whose properties raise what that has made."""

    @property
    def shape(self):
        raise RuntimeError("no sizes here")


NO_OPTIONS, NCCL = "options must be CommunicationOptions or None; got ", CommunicationOptions(implementation="NCCL")
# the call, and its error on every rank that makes it
WRONG_CALLS = {
    "object array": (lambda ops: ops.all_reduce(SUM, [np.array([None])]), UNSUPPORTED, "dtype object"),
    "no shape": (lambda ops: ops.all_reduce(SUM, _RaisesOfItsOwn()), UNSUPPORTED, "dtype object"),
    "operation": (lambda ops: ops.all_reduce("median", ONE), INVALID, "unknown reduce_op 'median'"),
    "complex order": (lambda ops: ops.all_reduce(MAX, [ONE * 1j]), UNSUPPORTED, "MAX is not defined for array 0"),
    "foreign bytes": (lambda ops: ops.all_reduce(SUM, [ONE.astype(">f4")]), UNSUPPORTED, "non-native byte order"),
    "out of another shape": (lambda ops: ops.all_reduce(SUM, [ONE], out=[np.ones(4, np.float32)]), INVALID, NO_OUT),
    "NCCL": (lambda ops: ops.all_reduce(SUM, [ONE], NCCL), TransportError, "NCCL was asked for"),
    "all_gather of a scalar": (lambda ops: ops.all_gather(np.array(1.0)), INVALID, NO_AXES),
    "all_gather along no axis": (lambda ops: ops.all_gather(ONE, None), TypeError, "axis must be an int; got None"),
    "gather axis": (lambda ops: ops.all_gather(ROWS, 2), INVALID, NO_AXIS.format(2) + r"shape \(2, 3\): -2 to 1 are accepted"),
    "all_gather along an axis before the first": (lambda ops: ops.all_gather(np.ones(2), -2), INVALID, NO_AXIS.format(-2)),
    "all_gather of texts": (lambda ops: ops.all_gather(np.array(["a"])), UNSUPPORTED, NO_DTYPE),
    "broadcast from before the first": (lambda ops: ops.broadcast(ONE, -1), INVALID, rf"{NO_ROOT}-1"),
    "broadcast from after the last": (lambda ops: ops.broadcast(ONE, ops.size), INVALID, rf"{NO_ROOT}\d"),
    "broadcast from nobody": (lambda ops: ops.broadcast(ONE, None), TypeError, "root must be an int; got None"),
    "scatter a scalar": (lambda ops: ops.reduce_scatter(SUM, np.array(1.0)), INVALID, f"reduce_scatter {NO_AXES}"),
    "scatter axis": (lambda ops: ops.reduce_scatter(SUM, ONE, 1), INVALID, NO_AXIS.format(1) + r"shape \(3,\): -1 to 0 are"),
    "scatter along half an axis": (lambda ops: ops.reduce_scatter(SUM, ONE, 0.5), TypeError, r"axis must be an int; got 0\.5"),
    "scatter along no axis": (lambda ops: ops.reduce_scatter(SUM, ONE, None), TypeError, "axis must be an int; got None"),
    "bool": (lambda ops: ops.reduce_scatter(MEAN, ONE > 0), UNSUPPORTED, "MEAN is not defined for array 0 of dtype bool"),
    "too many": (lambda ops: ops.all_to_all([ONE] * (ops.size + 1)), INVALID, r"one array for each of the \d replicas; got \d"),
    "objects": (lambda ops: ops.all_to_all([np.array([None])] * ops.size), UNSUPPORTED, NO_DTYPE),
    "gather to nobody": (lambda ops: ops.gather(np.ones(1), root=ops.size), INVALID, rf"{NO_ROOT}\d"),
    "gather texts": (lambda ops: ops.gather(np.array(["a"])), UNSUPPORTED, NO_DTYPE),
    "gather with options that are none": (lambda ops: ops.gather(ONE, 0, {}), INVALID, NO_OPTIONS + r"\{\}"),
    "barrier with a text": (lambda ops: ops.barrier("now"), INVALID, f"{NO_OPTIONS}'now'"),
}


@pytest.mark.parametrize("strict", [True, False])  # without strict mode calls take their fast paths
def test_a_wrong_call_is_refused_on_every_rank(mixed, strict):
    mixed.is_strict = strict
    for what, (wrong, error, message) in WRONG_CALLS.items():
        with refused(mixed, what, error, message):
            wrong(mixed)


@needs_ranks(2)
def test_a_wrong_call_or_parts_that_do_not_fit_on_one_rank_raise_on_all(mixed):
    for what, (wrong, error, message) in WRONG_CALLS.items():
        with refused(mixed, what, *((error, message) if mixed.rank == 1 else (AgreementError, "rank 1: "))):
            wrong(mixed) if mixed.rank == 1 else mixed.all_reduce(SUM, [ONE])
    arrays = [np.ones((2, 3))] * (mixed.size - 1) + [np.ones((2, 4))]
    with pytest.raises(InvalidArgumentError, match=r"differ in the first extent alone; got float64 \(2, 3\).*\(2, 4\)"):
        mixed.all_to_all(arrays)


@needs_ranks(2)
@pytest.mark.parametrize("strict", [True, False])
def test_arrays_that_do_not_fit_are_refused_on_every_rank(mixed, strict):
    mixed.is_strict = strict
    other, errors = mixed.rank == 1, (InvalidArgumentError, AgreementError)
    one, narrow = np.ones((2, 3)), np.ones((2, 3), np.complex64)
    unlike = [np.ones((2, 4)), np.ones((2, 3, 1)), np.ones(2), np.ones((2, 3), np.float32)]
    for one, another in [*((one, array) for array in unlike), (narrow, narrow.astype(np.complex128))]:
        with refused(mixed, f"{another.dtype} {another.shape}", errors, "all_gather"):
            mixed.all_gather(another if other else one)
    calls = {
        "gather needs equal shapes": lambda: mixed.gather(np.ones(3 if other else 2)),
        "gather needs .* one dtype": lambda: mixed.gather(np.ones(2, np.float32 if other else np.float64)),
        "gather needs .* one root": lambda: mixed.gather(np.ones(2), root=int(other)),
        "all_to_all needs one dtype": lambda: mixed.all_to_all([np.ones(2, np.int32 if other else np.int64)] * mixed.size),
        "all_to_all needs .* all axes but the first": lambda: mixed.all_to_all([np.ones((2, 3 + other))] * mixed.size),
    }
    for message, call in calls.items():
        with refused(mixed, message, errors, f"{message}|ranks made different calls"):
            call()


@pytest.mark.parametrize(
    ("dtype", "found"), [(">f8", "non-native byte order"), ("float8_e5m2", "dtype float8_e5m2"), ("int4", "dtype int4")]
)
def test_a_dtype_of_the_root_that_is_not_supported_is_refused_on_all_ranks(mixed, dtype, found):
    mixed.is_strict = False
    for _ in range(2):
        given = np.ones(5, dtype if mixed.rank == 0 else "<f8")
        with pytest.raises(UnsupportedDtypeError, match=f"the array of replica 0 has {found}"):
            mixed.broadcast(given)
        assert mixed.broadcast(np.full(5, mixed.rank), root=mixed.size - 1)[0] == mixed.size - 1
