"""ReplicaExchange: what a replica may hand to the others, and get from them, as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.arrays import Array, as_operand, like
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.sparse import IndexedSlices, gather_refused
from mpistrat.context.stack import current, misplaced
from mpistrat.device.binding import bound_device
from mpistrat.errors import MpistratError
from mpistrat.reduction import ReduceOp, check_meaning
from mpistrat.strategy.advice import ADVICE
from mpistrat.strategy.deprecated import hinted
from mpistrat.structures import flatten, leaf_names, rebuild

if TYPE_CHECKING:
    from mpistrat.strategy.extended import StrategyExtended

__all__ = ["ReplicaExchange", "read_leaves"]


class ReplicaExchange:
    """The collective calls of a replica context that move arrays. Every replica makes the same ones, in the same order.

    Values are nests: dicts, lists, tuples and registered classes of arrays, in any depth. Results are arrays of the kinds that
    came in: NumPy for NumPy and numbers, CuPy for CuPy, PyTorch for PyTorch. A variable counts as the array of this replica.

    Parameters
    ----------
    extended : StrategyExtended
        How the strategy communicates.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended
        self._ops = extended.communicator
        # arrays of the host need not be looked at; where replicas compute on GPUs, these are refused
        self._is_quick = extended.is_stock and bound_device() is None

    def all_gather(
        self,
        value: Any,
        axis: int,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Concatenate the components of a value along an axis, in replica order; every replica receives the result.

        A collective call.

        Parameters
        ----------
        value : nest of array_like
            Each leaf has at least one axis; extents agree between replicas except along `axis`.
        axis : int
            Where to concatenate.
        options : CommunicationOptions, optional
            Merged over those of the strategy.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        InvalidArgumentError
            If a leaf has no such axis, or other extents differ.
        UnsupportedDtypeError
            If a leaf is not an array of numbers.
        NotImplementedError
            If a leaf is IndexedSlices.
        """
        wanted = hinted(options, experimental_hints)
        return self._each("all_gather", f"axis={axis}", value, wanted, lambda array: self._ops.all_gather(array, axis, wanted))

    def broadcast(self, value: Any, root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the value of replica `root`, on every replica. Not in TensorFlow.

        A collective call.

        Parameters
        ----------
        value : nest of array_like
            The same structure on all replicas; only the shapes and dtypes of `root` count.
        root : int
            The replica whose value it is.
        options : CommunicationOptions, optional
            Merged over those of the strategy.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        InvalidArgumentError
            If `root` is not a replica.
        UnsupportedDtypeError
            If a leaf is not an array of numbers.
        NotImplementedError
            If a leaf is IndexedSlices.
        """
        return self._each("broadcast", f"root={root}", value, options, lambda array: self._ops.broadcast(array, root, options))

    def reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, axis: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Combine a value across replicas; each replica receives its part along `axis`. Not in TensorFlow.

        A collective call. Parts are in replica order, as equal as can be, the first ones longer by one.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD, in any case.
        value : nest of array_like
            Each leaf has at least one axis, and the same shape on all replicas.
        axis : int
            Where to divide.
        options : CommunicationOptions, optional
            Merged over those of the strategy.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        TypeError
            If `reduce_op` is neither ReduceOp nor str.
        InvalidArgumentError
            If the operation is unknown, or a leaf has no such axis.
        UnsupportedDtypeError
            If a leaf is not an array, or the operation is not defined for its dtype, as the sum of booleans.
        NotImplementedError
            If a leaf is IndexedSlices.
        """
        self._require_current("reduce_scatter")
        try:
            op = ReduceOp.parse(reduce_op)
        except (TypeError, ValueError) as error:
            self._ops.refuse("reduce_scatter", error, options)
        return self._each(
            "reduce_scatter",
            f"{op.name}, axis={axis}",
            value,
            options,
            lambda array: self._ops.reduce_scatter(op, array, axis, options),
            lambda array: check_meaning(op, array.dtype),
        )

    def all_to_all(self, values: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        """Send array i to replica i; return what came from each replica, in replica order. Not in TensorFlow.

        A collective call.

        Parameters
        ----------
        values : sequence of array_like
            One for each replica, of one dtype and equal extents but for axis 0.
        options : CommunicationOptions, optional
            Merged over those of the strategy.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        InvalidArgumentError
            If there is not one array for each replica, or they do not fit.
        UnsupportedDtypeError
            If one of them is not an array of numbers.
        """
        self._require_current("all_to_all")
        leaves = list(values)
        try:
            check_options(options)
            arrays = [as_operand(leaf, f"values[{index}]") for index, leaf in enumerate(leaves)]
        except Exception as error:  # as in `_each`
            self._ops.refuse("all_to_all", error, options)
        return list(map(like, self._ops.all_to_all(arrays, options), leaves))

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all replicas have come here. A collective call. Not in TensorFlow.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        """
        self._require_current("barrier")
        self._ops.barrier(options)

    def _each(
        self,
        method: str,
        what: str,
        value: Any,
        options: CommunicationOptions | None,
        collective: Callable[[Array], Array],
        check: Callable[[Array], None] | None = None,
    ) -> Any:
        """Make a collective call for each leaf of a nest, after a check of each."""
        self._require_current(method)
        leaves, structure = flatten(value)
        try:
            check_options(options)
            arrays = read_leaves(value, leaves)
            for array in arrays:
                if isinstance(array, IndexedSlices):
                    raise gather_refused(array)
                if check is not None:
                    check(array)
        except Exception as error:  # whatever the user's arrays raise when they are read, the other replicas must learn of it
            self._ops.refuse(method, error, options)
        self._ops.note(f"{method}({what}) of {structure}", options)
        return rebuild(structure, [like(collective(array), leaf) for array, leaf in zip(arrays, leaves, strict=True)])

    def _require_current(self, method: str) -> None:
        if current().replica_context is not self:
            raise misplaced(f"ReplicaContext.{method}", "in the replica context it belongs to", *ADVICE[f"ctx.{method}"])


def read_leaves(value: Any, leaves: list[Any]) -> list[Any]:
    """Return the leaves of a value as arrays; slices stay slices."""
    try:
        return [leaf if isinstance(leaf, IndexedSlices) else as_operand(leaf) for leaf in leaves]
    except MpistratError:
        for name, leaf in zip(leaf_names(value), leaves, strict=True):
            if not isinstance(leaf, IndexedSlices):
                as_operand(leaf, name)
        raise
