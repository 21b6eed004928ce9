"""How variables of all kinds are changed: the methods, the checks of what they are given, and what they do to arrays.

================  ============================================================
`scatter_add`     adds each row
`scatter_sub`     subtracts it
`scatter_mul`     multiplies by it
`scatter_div`     divides by it
`scatter_min`     keeps the elementwise minimum of the row and the array
`scatter_max`     keeps the elementwise maximum
`scatter_update`  replaces the row of the array; the last one stays
================  ============================================================

Rows with the same index are applied one after another; none is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array, as_array, checksum, in_dtype, is_on_device, like, to_host
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.values import assignable, converted
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype

if TYPE_CHECKING:
    from typing_extensions import Self

Change = tuple[Array, ...]
"""What changes an array: another one of its shape; or some rows, and their indices."""

# the updates for which SUM and MEAN of the replicas' rows are not defined
COMPARING = ("scatter_max", "scatter_min", "scatter_update")

_UFUNCS = {
    "assign_add": np.add,
    "assign_sub": np.subtract,
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
}
_ORDERED = {"scatter_min": ReduceOp.MIN, "scatter_max": ReduceOp.MAX}

METHODS = ("assign", *_UFUNCS, "scatter_update")
"""What `ChangeMethods` do to an array: those that begin with ``scatter`` to some of its rows."""


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


def _shown(array: Array) -> str:
    return np.array2string(array, threshold=6, edgeitems=2, separator=", ").replace("\n", "")


def _unknown(argument: str, value: object, accepted: Iterable[Enum]) -> InvalidArgumentError:
    return InvalidArgumentError(f"{argument} must be one of {', '.join(map(str, accepted))}; got {value!r}")


class ChangeMethods:
    """The methods by which variables are changed, those on servers too; `_change` does it."""

    def _change(self, method: str, value: Any) -> Self:
        """Do one of `METHODS`, and return the variable."""
        raise NotImplementedError

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the variable to a value, and return it.

        A collective call inside ``strategy.run`` for a variable synchronized ON_WRITE. Outside it the next collective compares
        what ranks have assigned, values too where they take up to 1 MiB; with MPISTRAT_STRICT all are compared at once.

        A variable on servers communicates with these alone. The value has been taken when this returns, and may be changed.
        This rank reads it from then on; others do when this rank's function has ended, or before.

        Parameters
        ----------
        value : array_like
            Of the variable's shape. Inside ``strategy.run`` a per-replica value stands for the component of this replica.
        use_locking, name : bool, str
            Without effect, as in TensorFlow.
        read_value : bool
            Whether to return the variable; else None.

        Raises
        ------
        InvalidArgumentError
            If the shapes differ; under central storage also inside ``strategy.run`` with aggregation NONE.
        UnsupportedDtypeError
            If the kind of number does not fit.
        AgreementError
            On every replica, if they pass different values inside ``strategy.run`` and the aggregation is NONE. From the next
            collective, if ranks pass different ones outside it.
        """
        changed = self._change("assign", value)
        return changed if read_value else None

    def assign_add(self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Add to the variable, and return it; communicates and raises like `assign`.

        Outside ``strategy.run`` it raises InvalidArgumentError for a variable synchronized ON_READ with aggregation SUM. What
        several ranks add to a variable on servers at the same time is all added.
        """
        changed = self._change("assign_add", delta)
        return changed if read_value else None

    def assign_sub(self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Subtract from the variable, as `assign_add` adds to it. Not defined for bool."""
        changed = self._change("assign_sub", delta)
        return changed if read_value else None

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Add rows to the rows with the given indices, and return the variable.

        A collective call inside ``strategy.run``: the rows of all replicas are applied, in replica order; with MEAN each is
        divided by their number, with ONLY_FIRST_REPLICA only those of replica 0 are, with NONE the replicas' rows must be
        equal and are applied once. Outside it ranks compare their rows as `assign` does its values. Rows with the
        same index are applied one after another. Variables synchronized ON_READ refuse it.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            The rows and their indices. Replicas may have different numbers of rows, or none.
        use_locking, name : bool, str
            Without effect, as in TensorFlow.

        Raises
        ------
        InvalidArgumentError
            If rows have another shape than those of the variable or an index is out of range; under central storage also
            inside ``strategy.run`` with aggregation NONE.
        """
        return self._change("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Subtract rows, and return the variable; communicates and raises like `scatter_add`."""
        return self._change("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Multiply by rows, and return the variable; communicates and raises like `scatter_add`."""
        return self._change("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Divide by rows, and return the variable; communicates and raises like `scatter_add`. Not defined for integers."""
        return self._change("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Keep the elementwise minimum of rows and variable, and return it; communicates and raises like `scatter_update`."""
        return self._change("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Keep the elementwise maximum of rows and variable, and return it; communicates and raises like `scatter_update`."""
        return self._change("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Self:
        """Replace rows, and return the variable; communicates and raises like `scatter_add`.

        Inside ``strategy.run`` the aggregation must be ONLY_FIRST_REPLICA or NONE.
        """
        return self._change("scatter_update", sparse_delta)


def checked(method: str, value: Any, target: Array, owner: object) -> Change:
    """Return what `method` does with a value, after checking that it can change `target`, the array of `owner`."""
    if method.startswith("scatter"):
        return _checked_rows(method, value, target, owner)
    _check_method(method, target, owner)
    return (assignable(value, target, owner),)


def _checked_rows(method: str, delta: object, target: Array, owner: object) -> Change:
    if not isinstance(delta, IndexedSlices):
        raise TypeError(
            f"{owner!r}.{method} takes IndexedSlices; got {type(delta).__name__}.\n"
            f"    incorrect:  variable.{method}(values)\n"
            f"    correct:    variable.{method}(mpistrat.IndexedSlices(values, indices))"
        )
    _check_method(method, target, owner)
    values, indices = delta.values, delta.indices
    if target.ndim == 0 or values.shape[1:] != target.shape[1:]:
        raise InvalidArgumentError(f"{owner!r} has shape {target.shape}; rows of shape {values.shape[1:]} cannot be scattered")
    check_rows(indices, len(target), owner)
    return converted(values, target.dtype, owner), indices


def check_rows(indices: Array, num_rows: int, owner: object) -> None:
    """Raise InvalidArgumentError if an index is `num_rows` or more."""
    if indices.size and indices.max() >= num_rows:
        accepted = f"0 to {num_rows - 1} are accepted" if num_rows else "it has no rows"
        raise InvalidArgumentError(f"index {indices.max()} is out of range for {owner!r}: {accepted}")


def gathered_rows(rows: Change, aggregation: VariableAggregation, communicator: BaseCommunicator) -> Change:
    """Return the rows of all replicas, in replica order. A collective call."""
    rows = tuple(map(to_host, rows))  # rows are applied in host memory
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return tuple(map(communicator.broadcast, rows))
    values, indices = map(communicator.all_gather, rows)
    if aggregation is VariableAggregation.MEAN:
        wide = values.astype(_wide(values), copy=False)
        values = wide / wide.dtype.type(communicator.size)
    return values, indices


def apply(method: str, target: Array, change: Change) -> None:
    """Change `target`. Rows accumulate 16-bit floats in float32, and go through host memory."""
    if len(change) == 1:
        if method == "assign":
            target[...] = change[0]
        else:
            _UFUNCS[method](target, change[0], out=target)
        return
    values, indices = map(to_host, change)
    if method == "scatter_update" and not is_on_device(target):
        target[indices] = values
        return
    # each affected row once, in the accumulation dtype; CuPy would apply rows with the same index in any order
    touched, position = np.unique(indices, return_inverse=True)
    are_different = len(touched) == len(indices)
    if are_different:
        touched = indices
    wide = to_host(target[touched]).astype(_wide(target), copy=False)
    if method == "scatter_update":
        wide[slice(None) if are_different else position] = values
    elif are_different:  # faster than `at`
        _UFUNCS[method](wide, values.astype(wide.dtype, copy=False), out=wide)
    else:
        _UFUNCS[method].at(wide, position, values.astype(wide.dtype, copy=False))
    target[touched] = like(wide.astype(target.dtype, copy=False), target)


def _wide(array: Array) -> np.dtype[Any]:
    return accumulation_dtype(ReduceOp.SUM, array.dtype)


def _check_method(method: str, target: Array, owner: object) -> None:
    if method in _ORDERED:
        check_dtype(_ORDERED[method], target.dtype, repr(owner))
    if method in ("assign_sub", "scatter_sub") and target.dtype.kind == "b":
        raise UnsupportedDtypeError(f"{owner!r}.{method} is not defined for bool; accepted are integers, floats and complex")
    if method == "scatter_div" and target.dtype.kind in "biu":
        raise UnsupportedDtypeError(
            f"{owner!r}.{method} is not defined for {target.dtype}, which cannot hold a quotient; accepted are floats and "
            "complex numbers, or scatter_update with the quotients that you have rounded"
        )


def flat_indices(call: str, indices: Any, shape: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """Return the indices of entries in an array whose leading axes are flattened to one, and the shape of an entry."""
    array = to_host(as_array(indices, "indices"))
    if array.size and array.dtype.kind not in "iu":
        raise UnsupportedDtypeError(f"{call}: indices must be integers; got dtype {array.dtype}")
    if not array.ndim or array.shape[-1] > len(shape):
        accepted = f"up to {len(shape)} indices, one for each axis of shape {shape}"
        raise InvalidArgumentError(f"{call}: the last axis of indices holds {accepted}; got indices of shape {array.shape}")
    depth = array.shape[-1]
    numbers = np.zeros(array.shape[:-1], np.int64)
    for axis, extent in enumerate(shape[:depth]):
        along = array[..., axis]
        if along.size and not 0 <= int(along.min()) <= int(along.max()) < extent:
            found = f"got {int(along.min())} to {int(along.max())}"
            raise InvalidArgumentError(f"{call}: indices along axis {axis} must be 0 to {extent - 1}; {found}")
        numbers = numbers * extent + along.astype(np.int64)
    return numbers, shape[depth:]


def entries(array: Array, numbers: Array, entry: tuple[int, ...]) -> Array:
    """Return the entries of an array that `flat_indices` has named, as a new array."""
    taken = array.reshape(math.prod(array.shape[: array.ndim - len(entry)]), *entry).take(like(numbers, array), axis=0)
    return in_dtype(taken, taken.dtype)  # numbers become arrays without axes
