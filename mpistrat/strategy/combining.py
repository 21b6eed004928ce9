"""Combining: what a strategy makes of the components of per-replica values, outside ``run``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.arrays import Array, as_operand, like
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.sparse import IndexedSlices, gather_refused
from mpistrat.communicator.validate import check_gather
from mpistrat.context.values import across_replicas, select_replica
from mpistrat.reduction import ReduceOp
from mpistrat.strategy.deprecated import hinted
from mpistrat.strategy.reducing import check_doubtful, local_part
from mpistrat.structures import flatten, rebuild

if TYPE_CHECKING:
    from mpistrat.strategy.extended import StrategyExtended
    from mpistrat.strategy.replica_context import ReplicaContext

__all__ = ["Combining"]


class Combining:
    """The methods of a strategy that combine values across replicas. Results are arrays of the kinds that came in."""

    replica_context: ReplicaContext

    if TYPE_CHECKING:

        @property
        def extended(self) -> StrategyExtended:
            """What the strategy brings along."""

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int | Sequence[int] | None,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combine a per-replica value to plain arrays, which every rank receives.

        A collective call.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN, and with ``axis=None`` also MIN, MAX or PROD; in any case.
        value : nest of per-replica values
            The leaves are reduced together. A leaf that is not a distributed value is what this rank passes: MEAN, MIN and MAX
            combine the ranks' values; SUM and PROD are refused on every rank, unless it is zero on all. Of a mirrored value
            the mean, minimum and maximum are itself, and sums are refused likewise.
        axis : int, sequence of int, or None
            Axes to reduce each component over first. The mean is exact then: the sum over all replicas divided by the
            number of elements on all replicas, so replicas with fewer or no rows weigh as they should. Booleans are counted,
            as NumPy does; across replicas, with ``axis=None``, they have neither sum nor mean.
        options : CommunicationOptions, optional
            Merged over those of the strategy. Not in TensorFlow.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Returns
        -------
        nest of array
            Arrays of the kinds that came in: NumPy for NumPy, PyTorch for PyTorch. Of slices, slices.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If `reduce_op` is neither ReduceOp nor str, or `axis` of another type.
        InvalidArgumentError
            If the operation is unknown, an axis is out of range, the sum is ambiguous, or `options` are of another type.
        UnsupportedDtypeError
            If a component is not an array, or the operation is not defined for its dtype.
        NotImplementedError
            If slices are to be reduced over axes, or otherwise than by SUM or MEAN.
        AgreementError
            On every rank, if ranks pass different structures, shapes, dtypes, axes or operations, or did so in an earlier call.
        """
        self.extended.require_cross_replica("strategy.reduce")
        communicator = self.extended.communicator
        leaves, structure = flatten(across_replicas(value))
        wanted = hinted(options, experimental_hints)
        try:
            check_options(wanted)
            op = ReduceOp.parse(reduce_op)
            part = local_part(op, leaves, axis, communicator.size)
        except Exception as error:  # whatever the user's arrays raise when they are read, the other ranks must learn of it
            communicator.refuse("reduce", error, wanted)
        call = f"reduce({op.name}, axis={axis!r}) of {structure}, {len(part.sent)} arrays to combine"
        communicator.note(call, wanted)
        check_doubtful(part, communicator, wanted)
        totals = part.finish(self.extended.all_reduce(part.op, part.sent, wanted))
        communicator.confirm()
        return rebuild(structure, [like(*pair) for pair in zip(totals, select_replica(leaves), strict=True)])

    def gather(
        self,
        value: Any,
        axis: int,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Concatenate the components of a per-replica value along an axis, in replica order; every rank receives the result.

        A collective call.

        Parameters
        ----------
        value : nest of per-replica values
            Components have at least one axis, and agree in all extents but that of `axis`. The component of a leaf that is
            not a distributed value is what this rank passes.
        axis : int
            Where to concatenate.
        options : CommunicationOptions, optional
            Merged over those of the strategy. Not in TensorFlow.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        InvalidArgumentError
            If a component has no such axis, other extents differ, or `options` are of another type.
        NotImplementedError
            If a component is IndexedSlices.
        AgreementError
            On every rank, if ranks pass different structures, dtypes or axes.
        """
        self.extended.require_cross_replica("strategy.gather")
        communicator = self.extended.communicator
        leaves, structure = flatten(across_replicas(value))
        wanted = hinted(options, experimental_hints)
        try:
            check_options(wanted)
            arrays = [_gatherable(leaf, axis) for leaf in leaves]
        except Exception as error:  # as in `reduce`
            communicator.refuse("gather", error, wanted)
        communicator.note(f"gather(axis={axis}) of {structure}", wanted)
        results = [self.extended.all_gather(array, axis, wanted) for array in arrays]
        return rebuild(structure, [like(*pair) for pair in zip(results, select_replica(leaves), strict=True)])

    def broadcast(self, value: Any, root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the value of replica `root` as plain arrays, on every rank. Not in TensorFlow.

        A collective call.

        Parameters
        ----------
        value : nest of array_like
            The same structure on all ranks; only the shapes and dtypes of `root` count.
        root : int
            The replica whose value it is.
        options : CommunicationOptions, optional
            Merged over those of the strategy.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        InvalidArgumentError
            If `root` is not a replica.
        UnsupportedDtypeError
            If a leaf is not an array of numbers.
        """
        self.extended.require_cross_replica("strategy.broadcast")
        with self.replica_context as context:
            return context.broadcast(select_replica(value), root, options)


def _gatherable(leaf: Any, axis: int) -> Array:
    component = select_replica(leaf)
    if isinstance(component, IndexedSlices):
        raise gather_refused(component)
    array = as_operand(component)
    check_gather(array, axis)
    return array
