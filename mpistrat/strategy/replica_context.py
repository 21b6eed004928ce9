"""ReplicaContext: the replica inside ``strategy.run``, and its collectives."""

from __future__ import annotations

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
from mpistrat.context.stack import Mode, current, entered, in_replica_context_of, misplaced, pop, push
from mpistrat.context.values import regroup, select_replica
from mpistrat.device.binding import bound_device
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.execution.work import Work
from mpistrat.reduction import ReduceOp, check_across_replicas
from mpistrat.strategy.advice import ADVICE
from mpistrat.strategy.call_digests import OF_NESTS, OPERATIONS, all_reduce_text, digest_of_nest
from mpistrat.strategy.deprecated import merge_hints
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.leaves import check_dtypes, read_leaves
from mpistrat.strategy.out_arrays import read_out
from mpistrat.strategy.replica_id import checked_id
from mpistrat.strategy.weighting import weighted_part
from mpistrat.structures import ONE_LEAF, flatten, flatten_arrays

__all__ = ["ReplicaContext", "Updatable"]

_FRAMES = 3  # stack frames between the communicator's method and the user's line, which a stall report names


class Updatable(Protocol):
    """What `ReplicaContext.update` accepts: a variable of the context's strategy."""

    def writable(self) -> Array:
        """Return the array of this replica, writable."""


class ReplicaContext:
    """The replica inside ``strategy.run``; a context manager.

    Every replica makes the same collective calls, in the same order. Values are nests: dicts, lists, tuples and registered
    classes of arrays, at any depth. Results are arrays of the library that the arguments belong to: CuPy for CuPy, PyTorch for
    PyTorch, NumPy for NumPy and numbers. A variable stands for its array on this replica.

    Parameters
    ----------
    strategy : Strategy
        The strategy of the replica.
    replica_id_in_sync_group : int, integer array or None
        The index of the replica over all nodes; None: the rank.

    Raises
    ------
    InvalidArgumentError
        If the index is not an integer, or out of range.
    """

    def __init__(self, strategy: Any, replica_id_in_sync_group: Any = None) -> None:
        self._strategy = strategy
        self._extended: StrategyExtended = strategy.extended
        self._communicator: BaseCommunicator = self._extended.communicator
        # the fast path takes NumPy arrays without checks; replicas that compute on GPUs refuse these
        self._has_fast_path = self._extended.uses_default_ops and bound_device() is None
        if replica_id_in_sync_group is None:
            replica_id_in_sync_group = self._communicator.rank
        self._replica_id = checked_id(replica_id_in_sync_group, self._communicator.size)
        self.mode = Mode(strategy, self)

    @property
    def strategy(self) -> Any:
        """The strategy of this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The index of this replica over all nodes, from 0 to `num_replicas_in_sync` - 1."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
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
        out: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce a value over all replicas; every replica receives the result.

        A collective call: every replica makes it, with the same structure, shapes and dtypes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD; case does not matter.
        value : nest of array_like or IndexedSlices
            The leaves are reduced together, as one batch.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy.
        weight : float, optional
            For the MEAN of floats or complex numbers: the weight of this replica, for example the number of its examples. The
            result is the sum of ``weight * value`` over all replicas, divided by the sum of the weights; NaN if all weights are
            0. A replica with weight 0 contributes nothing, even if its value is NaN. Not in TensorFlow.
        out : nest of array, optional
            C-contiguous arrays of NumPy, CuPy or PyTorch to write to, in the structure, shapes and dtypes of the value; it may
            be `value` itself, so that gradients exist once. Not together with a `weight`. Not in TensorFlow.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Returns
        -------
        nest of array
            `out`, or new arrays of the same shapes and dtypes, in the same structure.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        TypeError
            If `reduce_op` is neither ReduceOp nor str.
        InvalidArgumentError
            If the operation is unknown, `options` have another type, `out` does not fit, or `weight` is negative, not a
            number, out of range for the dtype of a leaf, or passed with another operation than MEAN.
        UnsupportedDtypeError
            If a leaf is not an array, or the operation is not defined for its dtype, such as SUM for booleans.
        NotImplementedError
            If a leaf is IndexedSlices, and the operation is neither SUM nor MEAN, or there is a `weight`.
        AgreementError
            On every replica, if replicas pass different structures, shapes, dtypes or operations. If MPI reduces the arrays
            between nodes, a later call raises it; with MPISTRAT_STRICT this one does.
        """
        self._require_current("all_reduce")
        is_plain = options is None and weight is None and experimental_hints is None and out is None
        if is_plain and (reduced := self._fast_all_reduce(reduce_op, value)) is not None:
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
                sent, finish = weighted_part(op, arrays, weight, out)
            targets, arrays = (None, arrays) if out is None else read_out(out, structure, leaves, arrays)
        except Exception as error:  # the other replicas must raise too, whatever reading the user's arrays raises
            self._communicator.refuse("all_reduce", error, options)
        if weight is not None:
            self._communicator.note(f"all_reduce({op.name}, weighted) of {structure}", options)
            results = finish(self._extended.all_reduce(ReduceOp.SUM, sent, options))
        else:
            if structure != ONE_LEAF:
                self._communicator.note(all_reduce_text(op, structure), options)
            try:
                results = self._extended.all_reduce(op, arrays, options, targets)
            except UnsupportedDtypeError:
                check_dtypes(op, value, arrays)
                raise
        if out is None:
            return structure.unflatten(list(map(like, results, leaves)))
        list(map(like, results, flatten(out)[0]))  # the streams of a tensor's own library wait for what was written
        return out

    def start_all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Work[Any]:
        """Start an `all_reduce`, and return a handle to wait for it. Not in TensorFlow.

        A collective call. Started operations run in the background, one after the other in the order of the calls, which must
        be the same on all replicas. Any number can be started; every other collective of the strategy waits until they are
        complete. The arrays of `value` must not be changed before ``wait()`` returns. The deadline of an operation counts from
        when it begins to run.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD; case does not matter.
        value : nest of array_like or IndexedSlices
            As for `all_reduce`, which also documents the errors.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy.

        Returns
        -------
        Work
            ``done()`` tells whether it is complete; ``wait()`` returns the result of the `all_reduce`. Both raise its error.
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
        return work.then(lambda results: structure.unflatten(list(map(like, results, leaves))))

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
            Each leaf has at least one axis, and the same shape on all replicas except along `axis`.
        axis : int
            The axis to concatenate along.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        InvalidArgumentError
            If a leaf has no such axis, or the shapes differ along another one.
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
            The same structure on all replicas; shapes and dtypes are those of `root`.
        root : int
            The replica whose value is returned.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy.

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
        """Reduce a value over all replicas; each replica receives its shard along `axis`. Not in TensorFlow.

        A collective call. Shards are in replica order, as by ``np.array_split``: the first ones may be longer by one.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD; case does not matter.
        value : nest of array_like
            Each leaf has at least one axis, and the same shape on all replicas.
        axis : int
            The axis to split along.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        TypeError
            If `reduce_op` is neither ReduceOp nor str.
        InvalidArgumentError
            If the operation is unknown, or a leaf has no such axis.
        UnsupportedDtypeError
            If a leaf is not an array, or the operation is not defined for its dtype, such as SUM for booleans.
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
        """Send array i to replica i; return the arrays received from all replicas, in replica order. Not in TensorFlow.

        A collective call.

        Parameters
        ----------
        values : sequence of array_like
            One array for each replica, all of the same dtype, and of the same shape except along axis 0.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        InvalidArgumentError
            If there is not one array for each replica, or their dtypes or shapes do not match.
        UnsupportedDtypeError
            If one of them is not an array of numbers.
        """
        self._require_current("all_to_all")
        leaves = list(values)
        try:
            check_options(options)
            arrays = [as_operand(leaf, f"values[{index}]") for index, leaf in enumerate(leaves)]
        except Exception as error:  # as in `all_reduce`
            self._communicator.refuse("all_to_all", error, options)
        return list(map(like, self._communicator.all_to_all(arrays, options), leaves))

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all replicas have called this. A collective call. Not in TensorFlow.

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
        """Call ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context, and return to replica context.

        A collective call: every replica makes it. `merge_fn` runs once on every rank, with the arguments of the replicas as
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
            On every replica, from the next collective, if some make another call or pass another structure.
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
        """Update the component of a variable by a function, without communication.

        Use it to apply a gradient that `all_reduce` has reduced. The arguments must be equal on all replicas for the variable
        to stay mirrored.

        Parameters
        ----------
        variable : Variable
            The variable to update.
        fn : callable
            Called as ``fn(array, *args, **kwargs)`` with the array of this replica. It returns the new value, or writes to the
            array and returns None.

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
        """Reduce a nest of NumPy arrays like an earlier one by the communicator's fast path; return None if there is none."""
        if not self._has_fast_path:
            return None
        try:
            op = OPERATIONS[reduce_op]
        except (TypeError, InvalidArgumentError):
            return None  # the full path refuses the operation on all replicas
        if type(value) is np.ndarray:
            results = self._communicator.all_reduce_again(op, (value,), 0, _FRAMES)
            return None if results is None else results[0]
        nest = flatten_arrays(value)
        if nest is None:
            return None
        leaves, structure = nest
        found = OF_NESTS.get((op._value_, id(structure)))
        results = self._communicator.all_reduce_again(op, leaves, found[0] if found else digest_of_nest(op, structure), _FRAMES)
        return None if results is None else structure.unflatten(results)

    def _for_each_leaf(
        self,
        method: str,
        what: str,
        value: Any,
        options: CommunicationOptions | None,
        collective: Callable[[Array], Array],
        check: Callable[[Array], None] | None = None,
    ) -> Any:
        """Check all leaves of a nest, then make a collective call for each."""
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
        except Exception as error:  # as in `all_reduce`
            self._communicator.refuse(method, error, options)
        self._communicator.note(f"{method}({what}) of {structure}", options)
        return structure.unflatten([like(collective(array), leaf) for array, leaf in zip(arrays, leaves, strict=True)])

    def _require_current(self, method: str) -> None:
        modes = entered.modes
        if not (modes and modes[-1] is self.mode) and current().replica_context is not self:
            raise misplaced(f"ReplicaContext.{method}", "in the replica context it belongs to", *ADVICE[f"ctx.{method}"])
