"""ReductionToOneDevice: one rank gathers all components and reduces them in replica order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array, as_operand, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.sparse import IndexedSlices, all_reduce_slices
from mpistrat.context.values import PerReplica, assignable
from mpistrat.cross_device.ops import CrossDeviceOps, current_communicator
from mpistrat.cross_device.pairs import deliver, resolve
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype, combine, divide, quiet

AccumulationFn = Callable[[list[Array]], Any]


class ReductionToOneDevice(CrossDeviceOps):
    """Gathers the components of a value on one rank, reduces them there in replica order, and broadcasts the result.

    Slow with many ranks, but the order of the sum is always the same, and `accumulation_fn` can be any function.

    Parameters
    ----------
    reduce_to_device : str or int, optional
        The rank that reduces, as a device string (``rank:1``) or a number; by default the first destination.
    accumulation_fn : callable, optional
        Replaces the sum: called on that rank as ``accumulation_fn([component_0, component_1, …])`` with arrays in the dtype of
        the accumulation (float32 for 16-bit floats), it returns an array of their shape, which MEAN divides. IndexedSlices are
        summed without it.
    """

    def __init__(self, reduce_to_device: str | int | None = None, accumulation_fn: AccumulationFn | None = None) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(f"accumulation_fn must be callable with a list of arrays; got {accumulation_fn!r}")
        self._reduce_to_device = reduce_to_device
        self._accumulation_fn = accumulation_fn

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Reduce one value: see `CrossDeviceOps.reduce_implementation`. A collective call."""
        communicator = current_communicator()
        [component] = per_replica_value.values
        ranks = resolve(destinations, communicator)
        if isinstance(component, IndexedSlices):
            return deliver(all_reduce_slices(communicator, reduce_op, component, options), ranks, communicator)
        with communicator.refusing("ReductionToOneDevice", options):
            array = as_operand(component)
            check_dtype(reduce_op, array.dtype)
            root = ranks[0] if self._reduce_to_device is None else self._root(communicator)
        result = self._combined(reduce_op, array, communicator.gather(array, root, options), communicator, options)
        if ranks != (root,):
            result = communicator.broadcast(result, root, options)
        return deliver(like(result, component), ranks, communicator)

    def _root(self, communicator: BaseCommunicator) -> int:
        """Return the rank that `reduce_to_device` names."""
        ranks = resolve(self._reduce_to_device, communicator)
        if len(ranks) > 1:
            raise InvalidArgumentError(
                f"reduce_to_device must name one rank, such as 'rank:0'; {self._reduce_to_device!r} names ranks {ranks}"
            )
        return ranks[0]

    def _combined(
        self,
        op: ReduceOp,
        array: Array,
        parts: list[Array] | None,
        communicator: BaseCommunicator,
        options: CommunicationOptions,
    ) -> Array:
        """Return the reduction of `parts` on the rank that has them, and a placeholder elsewhere."""
        if self._accumulation_fn is None:
            return array if parts is None else _finished(op, quiet()(_folded, op, parts), array, len(parts))
        error: Exception | None = None
        try:
            if parts is not None:
                array = _finished(op, self._accumulated(op, parts), array, len(parts))
        except Exception as refused:  # the other ranks must raise too, whatever the user's function raises
            error = refused
        communicator.agree(f"{op.name} by ReductionToOneDevice with an accumulation_fn", error, options)
        return array

    def _accumulated(self, op: ReduceOp, parts: list[Array]) -> Array:
        """Return the result of `accumulation_fn` for the components."""
        assert self._accumulation_fn is not None, "there is a function to call"
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise InvalidArgumentError(
                f"accumulation_fn replaces the sum, so it can be used for SUM and MEAN only; got {op.name}"
            )
        wide = accumulation_dtype(op, parts[0].dtype)
        total = as_array(self._accumulation_fn([part.astype(wide) for part in parts]), "what accumulation_fn returned")
        return assignable(total, np.empty_like(parts[0], wide), self)

    def __repr__(self) -> str:
        function = getattr(self._accumulation_fn, "__name__", type(self._accumulation_fn).__name__)
        chosen = "None" if self._accumulation_fn is None else function
        return f"ReductionToOneDevice(reduce_to_device={self._reduce_to_device!r}, accumulation_fn={chosen})"


def _folded(op: ReduceOp, parts: Sequence[Array]) -> Array:
    """Return the components reduced one after the other."""
    total = parts[0].astype(accumulation_dtype(op, parts[0].dtype))
    for part in parts[1:]:
        combine(op)(total, part, out=total)
    return total


def _finished(op: ReduceOp, total: Array, array: Array, count: int) -> Array:
    """Return a total as the result of the operation, divided for MEAN, in the dtype of `array`."""
    result = np.empty_like(array, order="C")
    if op is ReduceOp.MEAN:
        divide(total, count, result)
    else:
        quiet()(result.__setitem__, ..., total)
    return result
