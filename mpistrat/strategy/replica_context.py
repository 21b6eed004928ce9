"""ReplicaContext: what a function inside ``strategy.run`` knows about its replica, and may ask of the others."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from mpistrat.arrays import Array, as_operand, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.sparse import IndexedSlices, gather_refused
from mpistrat.context.assignment import assignable
from mpistrat.context.stack import Mode, current, in_replica_context_of, misplaced, pop, push
from mpistrat.context.values import regroup, select_replica
from mpistrat.device.binding import bound_device
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.execution.work import Work
from mpistrat.reduction import ReduceOp, check_across_replicas
from mpistrat.strategy.advice import ADVICE
from mpistrat.strategy.call_words import all_reduce_text, op_and_word, word_of_nest
from mpistrat.strategy.deprecated import merge_hints
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.leaves import check_dtypes, read_leaves
from mpistrat.strategy.weighting import weighted_part
from mpistrat.structures import flatten, flatten_arrays, rebuild

__all__ = ["ReplicaContext", "Updatable"]

_FRAMES = 3  # between the communicator and the program


class Updatable(Protocol):
    """What `ReplicaContext.update` changes: a variable of the context's strategy."""

    def writable(self) -> Array:
        """Return the array of this replica, to be written to."""


class ReplicaContext:
    """One replica inside ``strategy.run``; a context manager.

    Every replica makes the same collective calls, in the same order. Values are nests: dicts, lists, tuples and registered
    classes of arrays, in any depth. Results are arrays of the kinds that came in: NumPy for NumPy and numbers, CuPy for CuPy,
    PyTorch for PyTorch. A variable counts as the array of this replica.

    Parameters
    ----------
    strategy : Strategy
        Whose replica it is.
    replica_id_in_sync_group : int, integer array or None
        The number of the replica, counted over all nodes; None for that of this rank.

    Raises
    ------
    InvalidArgumentError
        If the id is not an integer of the strategy's replicas.
    """

    def __init__(self, strategy: Any, replica_id_in_sync_group: Any = None) -> None:
        self._strategy = strategy
        self._extended: StrategyExtended = strategy.extended
        self._communicator: BaseCommunicator = self._extended.communicator
        # arrays of the host need not be looked at; where replicas compute on GPUs, these are refused
        self._has_fast_path = self._extended.uses_default_ops and bound_device() is None
        if replica_id_in_sync_group is None:
            replica_id_in_sync_group = self._communicator.rank
        self._replica_id = _checked_id(replica_id_in_sync_group, self._communicator.size)
        self.mode = Mode(strategy, self)

    @property
    def strategy(self) -> Any:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, 0 … `num_replicas_in_sync` - 1 over all nodes."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose values are combined."""
        return self._communicator.size

    @property
    def devices(self) -> tuple[str]:
        """The device of this replica, in a tuple.

        .. deprecated:: TensorFlow 2.4
            A replica has one device; ``strategy.extended.worker_devices`` names those of the strategy.
        """
        warnings.warn(
            "ReplicaContext.devices is deprecated; use strategy.extended.worker_devices", DeprecationWarning, stacklevel=2
        )
        return (self._extended.replica_device,)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        weight: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combine a value across replicas; every replica receives the result.

        A collective call: every replica makes it, with the same structure, shapes and dtypes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD, in any case.
        value : nest of array_like or IndexedSlices
            The leaves are reduced together, as one batch.
        options : CommunicationOptions, optional
            Merged over those of the strategy.
        weight : float, optional
            With MEAN, of floats or complex numbers: how much this replica counts, for example the number of its examples. The
            result is the sum of ``weight * value`` over all replicas, divided by the sum of the weights: NaN where they are
            all 0. A replica with weight 0 contributes nothing, even NaN. Not in TensorFlow.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Returns
        -------
        nest of array
            New arrays of the shapes and dtypes passed, in the same structure.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        TypeError
            If `reduce_op` is neither ReduceOp nor str.
        InvalidArgumentError
            If the operation is unknown, `options` are of another type, or `weight` is negative, no number, out of the range of
            a leaf's dtype, or passed with another operation than MEAN.
        UnsupportedDtypeError
            If a leaf is not an array, or the operation is not defined for its dtype, as the sum of booleans.
        NotImplementedError
            If slices are to be combined otherwise than by SUM or MEAN without weight.
        AgreementError
            On every replica, if replicas pass different structures, shapes, dtypes or operations. Where MPI combines the arrays
            between nodes one of the next calls raises it, and this one if MPISTRAT_STRICT is on.
        """
        self._require_current("all_reduce")
        if options is None and weight is None and experimental_hints is None:
            reduced = self._fast_all_reduce(reduce_op, value)
            if reduced is not None:
                return reduced
        leaves, structure = flatten(value)
        if experimental_hints is not None:
            options = merge_hints(options, experimental_hints)
        try:
            if options is not None:
                check_options(options)
            op = ReduceOp.parse(reduce_op)
            arrays = read_leaves(value, leaves)
            if weight is not None:
                sent, finish = weighted_part(op, arrays, weight)
        except Exception as error:  # whatever the user's arrays raise when they are read, the other replicas must learn of it
            self._communicator.refuse("all_reduce", error, options)
        call = all_reduce_text(op, structure) if weight is None else f"all_reduce({op.name}, weighted) of {structure}"
        self._communicator.note(call, options)
        if weight is not None:
            results = finish(self._extended.all_reduce(ReduceOp.SUM, sent, options))
        else:
            try:
                results = self._extended.all_reduce(op, arrays, options)
            except UnsupportedDtypeError:
                check_dtypes(op, value, arrays)
                raise
        return rebuild(structure, list(map(like, results, leaves)))

    def start_all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Work[Any]:
        """Start what `all_reduce` does, and return its handle. Not in TensorFlow.

        A collective call. What was started goes on while the program computes: one operation after the other, in the order
        of the calls, which must be the same on all replicas. Any number may be under way; another collective of the strategy
        begins when they have ended. Until ``handle.wait()`` has returned, the arrays of `value` must not be changed. A deadline
        counts from when the turn of the operation comes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD, in any case.
        value : nest of array_like or IndexedSlices
            As for `all_reduce`, which says what is raised too.
        options : CommunicationOptions, optional
            Merged over those of the strategy.

        Returns
        -------
        Work
            ``done()`` asks whether it has ended; ``wait()`` returns what `all_reduce` would. Both raise what made it fail.
        """
        self._require_current("start_all_reduce")
        leaves, structure = flatten(value)
        try:
            check_options(options)
            op = ReduceOp.parse(reduce_op)
            arrays = read_leaves(value, leaves)
            check_dtypes(op, value, arrays)
        except Exception as error:  # as in `all_reduce`
            self._communicator.refuse("start_all_reduce", error, options)
        work = self._extended.start_all_reduce(op, arrays, options, structure)
        return work.then(lambda results: rebuild(structure, list(map(like, results, leaves))))

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
        wanted = merge_hints(options, experimental_hints)
        return self._for_each_leaf(
            "all_gather", f"axis={axis}", value, wanted, lambda array: self._communicator.all_gather(array, axis, wanted)
        )

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
        return self._for_each_leaf(
            "broadcast", f"root={root}", value, options, lambda array: self._communicator.broadcast(array, root, options)
        )

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
            self._communicator.refuse("reduce_scatter", error, options)
        return self._for_each_leaf(
            "reduce_scatter",
            f"{op.name}, axis={axis}",
            value,
            options,
            lambda array: self._communicator.reduce_scatter(op, array, axis, options),
            lambda array: check_across_replicas(op, array.dtype),
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
        except Exception as error:  # as in `_for_each_leaf`
            self._communicator.refuse("all_to_all", error, options)
        return list(map(like, self._communicator.all_to_all(arrays, options), leaves))

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all replicas have come here. A collective call. Not in TensorFlow.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        """
        self._require_current("barrier")
        self._communicator.barrier(options)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Leave the replica, call ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context, and come back.

        A collective call: every replica makes it. `merge_fn` runs once on every rank, with the replicas' arguments grouped into
        per-replica values.

        Returns
        -------
        nest
            The component of this replica of what `merge_fn` returned.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one: in cross-replica context, or on another thread.
        AgreementError
            On every replica, if some make another call instead, or pass another structure: from the next collective.
        """
        self._require_current("merge_call")
        outside = self._strategy.cross_replica_mode
        passed = (tuple(args), dict(kwargs or {}))
        self._communicator.note(f"merge_call with {flatten(passed)[1]}")
        grouped_args, grouped_kwargs = regroup(passed, self.num_replicas_in_sync)
        push(outside)
        try:
            return select_replica(merge_fn(self._strategy, *grouped_args, **grouped_kwargs))
        finally:
            pop(outside)

    def update(
        self, variable: Updatable, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Change the component of a variable by a function of values that are equal on all replicas.

        The way to apply a gradient that `all_reduce` has reduced: no further communication takes place, so the arguments
        must be the same on every replica for the variable to stay mirrored.

        Parameters
        ----------
        variable : Variable
            The variable to change.
        fn : callable
            Called as ``fn(array, *args, **kwargs)`` with the array of this replica. It returns the new value, or writes
            into the array and returns None.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one, or the variable belongs to another strategy.
        InvalidArgumentError
            If the new value has another shape than the variable.
        """
        self._require_current("update")
        component = variable.writable()
        given_args, given_kwargs = select_replica((tuple(args), dict(kwargs or {})))
        result = fn(component, *given_args, **given_kwargs)
        if result is not None:
            component[...] = assignable(result, component, variable)

    def __enter__(self) -> ReplicaContext:  # noqa: PYI034 - Self is newer than Python 3.10
        if in_replica_context_of(self._strategy, "strategy.run"):
            raise misplaced("strategy.run", "outside strategy.run", *ADVICE["ctx.__enter__"])
        push(self.mode)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pop(self.mode)

    def __repr__(self) -> str:
        return f"ReplicaContext(replica={self._replica_id}({self._communicator.size}))"

    def _fast_all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Combine a nest of arrays like an earlier one, in little time. None, and nothing done, where all must be looked at."""
        if not self._has_fast_path:
            return None
        try:
            op, word = op_and_word(reduce_op)
        except (TypeError, InvalidArgumentError):
            return None  # the other replicas must learn of it
        if type(value) is np.ndarray:
            results = self._communicator.all_reduce_again(op, (value,), word, _FRAMES)
            return None if results is None else results[0]
        nest = flatten_arrays(value)
        if nest is None:
            return None
        leaves, structure = nest
        results = self._communicator.all_reduce_again(op, leaves, word_of_nest(op, structure), _FRAMES)
        return None if results is None else rebuild(structure, results)

    def _for_each_leaf(
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
            self._communicator.refuse(method, error, options)
        self._communicator.note(f"{method}({what}) of {structure}", options)
        return rebuild(structure, [like(collective(array), leaf) for array, leaf in zip(arrays, leaves, strict=True)])

    def _require_current(self, method: str) -> None:
        if current().replica_context is not self:
            raise misplaced(f"ReplicaContext.{method}", "in the replica context it belongs to", *ADVICE[f"ctx.{method}"])


def _checked_id(replica_id: Any, num_replicas: int) -> int:
    try:
        index = operator.index(replica_id)
    except TypeError:
        index = -1
    if not 0 <= index < num_replicas:
        raise InvalidArgumentError(
            f"replica_id_in_sync_group must be None or an integer from 0 to {num_replicas - 1}; got {replica_id!r}"
        )
    return index
