"""ReplicaContext: the replica inside ``strategy.run``, and its collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_operand, as_target, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.validate import checked_index
from mpistrat.context.stack import Mode, current, entered, in_replica_context_of, inside, misplaced, pop, push
from mpistrat.context.values import assignable, checked_args, regroup, select_replica
from mpistrat.cross_device import HierarchicalAllReduce, operand_or_slices
from mpistrat.device.binding import bound_device
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.execution.engine import Work
from mpistrat.groups.agreement import digest_of
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.strategy.deprecated import accepts_hints, merge_hints
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.local_reduction import weighted_part
from mpistrat.strategy.virtual_replicas import sum_of_parts
from mpistrat.structures import MAX_CACHED_STRUCTURES, ONE_LEAF, Structure, each_leaf, flatten, flatten_arrays, leaf_names

_FRAMES = 3  # stack frames between the communicator's method and the user's line, which a stall report names


class ReplicaContext:
    """The replica inside ``strategy.run``; a context manager.

    Every replica makes the same collective calls, in the same order, with values of the same structure; otherwise all raise
    AgreementError. Values are nests: dicts, lists, tuples and registered classes of arrays, at any depth. Results are arrays of
    the library that the arguments belong to: CuPy for CuPy, PyTorch for PyTorch, NumPy for NumPy and numbers. A variable stands
    for its array on this replica. `Communicator` documents the collectives; options of a call override those of the strategy.
    Calls raise RuntimeError if this replica context is not the current one.

    Parameters
    ----------
    strategy : Strategy
        The strategy of the replica.
    replica_id_in_sync_group : int, integer array or None
        The index of the replica over all nodes; None: the rank.
    """

    def __init__(self, strategy: Any, replica_id_in_sync_group: Any = None) -> None:
        self._strategy = strategy
        self._extended: StrategyExtended = strategy.extended
        self._communicator: BaseCommunicator = self._extended.communicator
        # of the arrays by which calls are known, which are not looked at again: replicas on GPUs refuse those of NumPy
        device = bound_device()
        self._kind = np.ndarray if device is None else device.array_module.ndarray
        ops = self._extended.cross_device_ops
        # the default adds nothing to the communicator, which the fast path then calls directly
        self._ops = None if type(ops) is HierarchicalAllReduce and ops.num_packs is None else ops
        replica_id = self._communicator.rank if replica_id_in_sync_group is None else replica_id_in_sync_group
        self._replica_id = checked_index(replica_id, "replica_id_in_sync_group", self._communicator.size)
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
        """The device of this replica, in a tuple. Deprecated in TensorFlow 2.4: see `StrategyExtended.worker_devices`."""
        warnings.warn("ReplicaContext.devices is deprecated; use extended.worker_devices", DeprecationWarning, stacklevel=2)
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
        """Reduce a value over all replicas; every replica receives the result. As `Communicator.all_reduce`. A collective call.

        Parameters
        ----------
        value : nest of array_like or IndexedSlices
            The leaves are reduced together, as one batch. IndexedSlices are summed or averaged.
        weight : float, optional
            For the MEAN of floats or complex numbers: the weight of this replica, for example the number of its examples. The
            result is the sum of ``weight * value`` over all replicas, divided by the sum of the weights; NaN if all weights are
            0. A replica with weight 0 contributes nothing, even if its value is NaN. Not in TensorFlow.
        out : nest of array, optional
            C-contiguous arrays of NumPy, CuPy or PyTorch to write to, in the structure, shapes and dtypes of the value; it may
            be `value` itself, so that gradients exist once. Not together with a `weight`. Not in TensorFlow.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.
        """
        self._require_current("all_reduce")
        if weight is None and experimental_hints is None:
            reduced = self._try_fast_all_reduce(reduce_op, value, options, out)
            if reduced is not None:
                return reduced
        if experimental_hints is not None:
            options = merge_hints(options, experimental_hints)
        with self._communicator.refusing("all_reduce", options):
            leaves, structure = flatten(value)
            check_options(options)
            op = ReduceOp.parse(reduce_op)
            arrays = each_leaf(operand_or_slices, leaves, lambda: leaf_names(value))
            if weight is not None:
                sent, finish = weighted_part(op, arrays, weight, out)
            targets, arrays = (None, arrays) if out is None else read_out(out, structure, leaves, arrays)
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
        """Start an `all_reduce`, and return a handle to wait for it. As `Communicator.start_all_reduce`. A collective call.

        Any number can be started. The arrays of `value` must not be changed before ``wait()`` returns. Not in TensorFlow.
        """
        self._require_current("start_all_reduce")
        with self._communicator.refusing("start_all_reduce", options):
            leaves, structure = flatten(value)
            check_options(options)
            op = ReduceOp.parse(reduce_op)
            arrays = each_leaf(operand_or_slices, leaves, lambda: leaf_names(value))
            check_dtypes(op, value, arrays)
        work = self._extended.start_all_reduce(op, arrays, options, structure)
        return work.then(lambda results: structure.unflatten(list(map(like, results, leaves))))

    def sum_of_parts(
        self, fn: Callable[[Any], Any], batch: Any, virtual_replicas: int, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the sum of ``fn(part)`` over equal parts of a global batch, with the same bits on any number of replicas.

        A collective call. The parts, as many as there are virtual replicas, and the order in which their results are added do
        not depend on the replicas, on which each computes a run of them. Not in TensorFlow.

        Parameters
        ----------
        fn : callable
            Is called for each part of this replica, a batch like `batch` that may have no rows, and returns a nest of arrays
            that can be added: sums, for example of gradients, losses and rows. 16-bit floats are added in float32.
        batch : nest of array_like
            This replica's rows, dealt out by ``InputOptions(virtual_replicas=…)``.
        virtual_replicas : int
            The number of parts: at least the number of replicas. It must stay the same for results to stay the same.
        options : CommunicationOptions, optional
            Their deadline applies.

        Raises
        ------
        InvalidArgumentError
            If `virtual_replicas` is too small, a replica has not the rows of whole parts, or results differ in shape or dtype.
        AgreementError
            On every replica, if replicas pass other numbers, or `fn` returns other structures, shapes or dtypes on them.
        """
        self._require_current("sum_of_parts")
        return sum_of_parts(self._communicator, fn, batch, virtual_replicas, options)

    @accepts_hints
    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the components of a value along an axis. As `Communicator.all_gather`. A collective call."""
        self._require_current("all_gather")
        return self._extended.all_gather(value, axis, options)

    def broadcast(self, value: Any, root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the value of replica `root`. As `Strategy.broadcast`. A collective call. Not in TensorFlow."""
        self._require_current("broadcast")
        return self._extended.broadcast(value, root, options)

    def reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, axis: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce a value; each replica receives its shard. As `Communicator.reduce_scatter`. A collective call.

        Not in TensorFlow.
        """
        self._require_current("reduce_scatter")
        with self._communicator.refusing("reduce_scatter", options):
            op = ReduceOp.parse(reduce_op)
        return self._extended.for_each_leaf(
            "reduce_scatter",
            f"{op.name}, axis={axis}",
            value,
            options,
            lambda array: self._communicator.reduce_scatter(op, array, axis, options),
            lambda array: check_dtype(op, array.dtype),
        )

    def all_to_all(self, values: Sequence[Any], options: CommunicationOptions | None = None) -> list[Any]:
        """Send array i to replica i; return those received. As `Communicator.all_to_all`. A collective call.

        Not in TensorFlow.
        """
        self._require_current("all_to_all")
        with self._communicator.refusing("all_to_all", options):
            check_options(options)
            leaves = list(values)
            arrays = [as_operand(leaf, f"values[{index}]") for index, leaf in enumerate(leaves)]
        return list(map(like, self._communicator.all_to_all(arrays, options), leaves))

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all replicas have called this. A collective call. Not in TensorFlow."""
        self._require_current("barrier")
        self._communicator.barrier(options)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context; return this replica's component of its result.

        A collective call. `merge_fn` runs once on every rank, with the arguments of the replicas as per-replica values.
        """
        self._require_current("merge_call")
        with self._communicator.refusing("merge_call"):
            passed = (checked_args(args), dict(kwargs or {}))
            structure = flatten(passed)[1]
        self._communicator.note(f"merge_call with {structure}")
        grouped_args, grouped_kwargs = regroup(passed, self.num_replicas_in_sync)
        with inside(self._strategy.cross_replica_mode):
            return select_replica(merge_fn(self._strategy, *grouped_args, **grouped_kwargs))

    def update(
        self, variable: Any, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Update the component of a variable by ``fn(array, *args, **kwargs)``, without communication.

        Under central storage it is a collective call: the array of the rank that keeps the variable is broadcast.

        `fn` returns the new value of this replica's array, of its shape, or writes to the array and returns None. Use it to
        apply a gradient that `all_reduce` has reduced: a variable stays mirrored if arguments are equal on all replicas.
        """
        self._require_current("update")
        if not hasattr(variable, "writable"):
            self._communicator.refuse("update", TypeError(f"update changes a mpistrat.Variable of replicas; got {variable!r}"))
        component = variable.writable()
        given_args, given_kwargs = select_replica((tuple(args), dict(kwargs or {})))
        result = fn(component, *given_args, **given_kwargs)
        if result is not None:
            component[...] = assignable(result, component, variable)
        variable.send_root()

    def __enter__(self) -> ReplicaContext:  # noqa: PYI034 - Self is newer than Python 3.10
        if in_replica_context_of(self._strategy, "strategy.run"):
            raise misplaced("strategy.run", "outside strategy.run")
        push(self.mode)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pop(self.mode)

    def __repr__(self) -> str:
        return f"ReplicaContext(replica={self._replica_id}({self._communicator.size}))"

    def _try_fast_all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None, out: Any
    ) -> Any:
        """Reduce a nest of arrays like an earlier one by the communicator's fast path; return None if there is none."""
        try:
            op = OPERATIONS[reduce_op]
        except (TypeError, InvalidArgumentError):
            return None  # the full path refuses the operation on all replicas
        structure: Structure | None = None
        if type(value) is self._kind:
            leaves, targets, noted = [value], None if out is None else [out], 0
        else:
            nest = flatten_arrays(value, self._kind)
            into = nest if out is value else None if out is None else flatten_arrays(out, self._kind)
            if nest is None or (out is not None and (into is None or into[1] != nest[1])):
                return None
            leaves, structure = nest
            targets = None if into is None else into[0]
            found = OF_NESTS.get((op._value_, id(structure)))
            noted = found[0] if found else digest_of_nest(op, structure)
        if self._ops is not None and (options := self._ops.all_reduce_options(self._communicator, options)) is None:
            return None
        results = self._communicator.try_fast_all_reduce(op, leaves, options, targets, noted, _FRAMES)
        if results is None:
            return None
        if out is not None:
            return out
        return results[0] if structure is None else structure.unflatten(results)

    def _require_current(self, method: str) -> None:
        modes = entered.modes
        if not (modes and modes[-1] is self.mode) and current().replica_context is not self:
            raise misplaced(f"ReplicaContext.{method}", "in the replica context it belongs to", f"ctx.{method}")


def check_dtypes(op: ReduceOp, value: Any, arrays: list[Any]) -> None:
    """Check that `op` is defined across replicas for the dtype of each leaf of a value; the error names the leaf."""
    each_leaf(lambda array, name="value": check_dtype(op, array.dtype, name), arrays, lambda: leaf_names(value))


def read_out(out: Any, structure: Structure, leaves: Sequence[Any], arrays: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Return the memory of the leaves of `out`, and what is reduced: for a leaf that is in both, one array in both lists."""
    targets, found = flatten(out)
    if found != structure:
        raise InvalidArgumentError(f"out must have the structure of the value, {structure}; got {found}")
    memory = [as_target(target, name) for target, name in zip(targets, leaf_names(out, "out"), strict=True)]
    given = zip(targets, leaves, memory, arrays, strict=True)
    return memory, [each if target is leaf else array for target, leaf, each, array in given]


def all_reduce_text(op: ReduceOp, structure: Structure) -> str:
    """Return the text of an all-reduce of a nest of this structure."""
    return f"all_reduce({op.name}) of {structure}"


class _Operations(dict[ReduceOp | str, ReduceOp]):
    def __missing__(self, reduce_op: ReduceOp | str) -> ReduceOp:
        op = self[reduce_op] = ReduceOp.parse(reduce_op)
        return op


OPERATIONS = _Operations()
"""For each spelling of an operation: the operation."""

OF_NESTS: dict[tuple[str, int], tuple[int, Structure]] = {}
"""The cache of `digest_of_nest`, by the name of the operation and the id of the structure, which is kept alive."""


def digest_of_nest(op: ReduceOp, structure: Structure) -> int:
    """Return the digest of an all-reduce of a nest, and cache it."""
    if len(OF_NESTS) >= MAX_CACHED_STRUCTURES:
        OF_NESTS.clear()
    digest = digest_of(all_reduce_text(op, structure))
    OF_NESTS[op._value_, id(structure)] = digest, structure
    return digest
