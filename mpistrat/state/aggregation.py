"""Aggregation and synchronization of variables: the enumerations, and the collectives they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from hashlib import blake2b

import numpy as np

from mpistrat.arrays import Array, in_dtype, to_host
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp


class VariableSynchronization(Enum):
    """When the arrays of a variable are combined; AUTO means ON_WRITE, and NONE is refused."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(Enum):
    """How the values of the replicas are combined."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


def checked_synchronization(synchronization: object) -> VariableSynchronization:
    """Return ON_WRITE or ON_READ; None means AUTO, as it does in TensorFlow."""
    kinds = VariableSynchronization
    if synchronization in (None, kinds.AUTO, kinds.ON_WRITE):
        return kinds.ON_WRITE
    if synchronization is kinds.ON_READ:
        return kinds.ON_READ
    raise _unknown("synchronization", synchronization, (kinds.AUTO, kinds.ON_WRITE, kinds.ON_READ))


def checked_aggregation(aggregation: object) -> VariableAggregation:
    """Return `aggregation`; None means NONE, as it does in TensorFlow."""
    if aggregation is None:
        return VariableAggregation.NONE
    if isinstance(aggregation, VariableAggregation):
        return aggregation
    raise _unknown("aggregation", aggregation, VariableAggregation)


def share(total: Array, communicator: BaseCommunicator) -> Array:
    """Return this replica's part of a sum: total / replicas; integers are split without a remainder, booleans are not split."""
    if total.dtype.kind == "b":
        return total
    if total.dtype.kind in "iu":
        quotient, rest = np.divmod(total.astype(np.uint64 if total.dtype.kind == "u" else np.int64), communicator.size)
        return in_dtype(quotient + (communicator.rank < rest), total.dtype)
    return in_dtype(total / total.dtype.type(communicator.size), total.dtype)


def check_equal(call: str, arrays: tuple[Array, ...], communicator: BaseCommunicator) -> None:
    """Check that all replicas pass the same arrays, bit by bit. A collective call."""
    arrays = tuple(map(to_host, arrays))
    mine = checksum(arrays)
    least = communicator.all_reduce(ReduceOp.MIN, [np.array([mine, -mine])])[0]
    if least.tolist() != [mine, -mine]:
        shown = ", ".join(f"{array.dtype} {array.shape} {_shown(array)}" for array in arrays)
        communicator.agree(f"{call} of {shown} (checksum {mine:x})")


def checksum(arrays: Iterable[Array], most_bytes: int | None = None) -> int:
    """Return a hash of the bits of arrays, below 2**62; of a larger array than `most_bytes`, of evenly spaced elements."""
    digest = blake2b(digest_size=8)
    for array in arrays:
        if most_bytes is not None and array.nbytes > most_bytes:
            array = array.reshape(-1)[:: -(-array.nbytes // most_bytes)]
        digest.update(np.ascontiguousarray(to_host(array)).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little") >> 2


def _shown(array: Array) -> str:
    return np.array2string(array, threshold=6, edgeitems=2, separator=", ").replace("\n", "")


def _unknown(argument: str, value: object, accepted: Iterable[Enum]) -> InvalidArgumentError:
    return InvalidArgumentError(f"{argument} must be one of {', '.join(map(str, accepted))}; got {value!r}")
