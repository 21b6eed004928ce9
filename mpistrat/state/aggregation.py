"""How the values of the replicas become one: the enumerations, and what they do to arrays."""

from __future__ import annotations

from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpistrat.arrays import Array, in_dtype, to_host
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp

if TYPE_CHECKING:
    from mpistrat.cross_device.collectives import Collectives
    from mpistrat.strategy.base import Strategy

__all__ = [
    "VariableAggregation",
    "VariableSynchronization",
    "aggregated",
    "check_equal",
    "checked_aggregation",
    "checked_synchronization",
    "share",
]


class VariableSynchronization(Enum):
    """When the arrays of a variable are brought together; AUTO means ON_WRITE, and NONE is refused."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(Enum):
    """How the values of the replicas become one."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


_E = TypeVar("_E", bound=Enum)


def checked_synchronization(synchronization: object) -> VariableSynchronization:
    """Return ON_WRITE or ON_READ.

    Raises
    ------
    InvalidArgumentError
        If `synchronization` is NONE or no member.
    """
    kinds = VariableSynchronization
    accepted = (kinds.AUTO, kinds.ON_WRITE, kinds.ON_READ)
    given = _member(kinds, None if synchronization is kinds.NONE else synchronization, "synchronization", accepted)
    return kinds.ON_WRITE if given is kinds.AUTO else given


def checked_aggregation(aggregation: object) -> VariableAggregation:
    """Return `aggregation`.

    Raises
    ------
    InvalidArgumentError
        If it is no member.
    """
    return _member(VariableAggregation, aggregation, "aggregation", VariableAggregation)


def aggregated(aggregation: VariableAggregation, array: Array, strategy: Strategy) -> Array:
    """Return the arrays of all replicas as one. A collective call, of `strategy`, inside its ``run`` or outside.

    Parameters
    ----------
    aggregation : VariableAggregation
        Any but NONE. SUM and MEAN add 16-bit floats in float32.
    array : ndarray
        That of this replica; shape and dtype are equal on all.
    strategy : Strategy
        Whose replicas they are.
    """
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return strategy.extended.collectives.broadcast(array)
    total: Array = strategy.extended.all_reduce(ReduceOp[aggregation.name], [array])[0]
    return total


def share(total: Array, collectives: Collectives) -> Array:
    """Return this replica's part of a sum: equal ones, but of integers without a remainder; a boolean is its own part."""
    if total.dtype.kind == "b":
        return total
    if total.dtype.kind in "iu":
        quotient, rest = np.divmod(total.astype(np.uint64 if total.dtype.kind == "u" else np.int64), collectives.size)
        return in_dtype(quotient + (collectives.rank < rest), total.dtype)
    return in_dtype(total / total.dtype.type(collectives.size), total.dtype)


def check_equal(call: str, arrays: tuple[Array, ...], collectives: Collectives) -> None:
    """Check, strict mode or not, that all replicas pass the same arrays, bit by bit. A collective call.

    Raises
    ------
    AgreementError
        On every replica, if they do not; `call` is what the message says they were passed to.
    """
    arrays = tuple(map(to_host, arrays))
    digest = blake2b(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays), digest_size=8)
    mine = int.from_bytes(digest.digest(), "little") >> 2
    least = collectives.all_reduce(ReduceOp.MIN, [np.array([mine, -mine])])[0]
    if least.tolist() != [mine, -mine]:
        shown = ", ".join(f"{array.dtype} {array.shape} {_shown(array)}" for array in arrays)
        collectives.agree(f"{call} of {shown} (checksum {mine:x})")


def _shown(array: Array) -> str:
    return np.array2string(array, threshold=6, edgeitems=2, separator=", ").replace("\n", "")


def _member(enum: type[_E], value: object, argument: str, accepted: Any) -> _E:
    if isinstance(value, enum):
        return value
    names = ", ".join(str(member) for member in accepted)
    raise InvalidArgumentError(f"{argument} must be one of {names}; got {value!r}")
