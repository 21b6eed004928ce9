"""PlanCache: bound plans by operation, options, and the shapes and dtypes of arrays."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpistrat import settings
from mpistrat.algorithms import planners
from mpistrat.algorithms.choose import Choice, choose
from mpistrat.algorithms.chunks import part_bounds
from mpistrat.algorithms.cost import DEFAULT, CostModel
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.arrays import Array
from mpistrat.communicator.bound_batch import BoundBatch, Bucket, LaidOut, bind_batch, is_current, lay_out
from mpistrat.communicator.explain import Explanation, Pack
from mpistrat.communicator.options import WIRE_DTYPES, CommunicationImplementation, CommunicationOptions
from mpistrat.communicator.validate import describe_all_reduce
from mpistrat.errors import InvalidArgumentError, TransportError, Unsuitable
from mpistrat.execution.bound_scatter import BoundScatter
from mpistrat.execution.device_executor import DeviceScatter
from mpistrat.execution.executor import Executor
from mpistrat.execution.memory import MemoryReport
from mpistrat.packing.wire import Wire
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype

__all__ = ["BATCHES_KEPT", "PlanCache"]

BATCHES_KEPT = 64

_WIRE_OPS = (ReduceOp.SUM, ReduceOp.MEAN)


class PlanCache:
    """Chooses and binds plans, and keeps the last 64.

    Parameters
    ----------
    executor : Executor
        Binds the plans.
    say : callable
        Logs which plan was chosen, and why.
    model : CostModel
        The cost model of algorithm ``auto``.
    """

    def __init__(self, executor: Executor, say: Callable[[str], None], model: CostModel = DEFAULT) -> None:
        self._executor, self._world, self._say, self.model = executor, executor.hierarchy.world, say, model
        self._chunk_bytes = executor.hierarchy.settings[settings.CHUNK_BYTES]
        self._plans: OrderedDict[tuple[Any, ...], BoundBatch] = OrderedDict()
        self._num_evicted = 0

    def find(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
        axis: int | None = None,
    ) -> BoundBatch:
        """Return the plan for such arrays. A collective call if there is none yet.

        Parameters
        ----------
        op, arrays, options : ReduceOp, sequence of ndarray, CommunicationOptions
            As for `Communicator.all_reduce`.
        axis : int or None
            None: an all-reduce. Else a reduce-scatter of one array along this axis, or an all-reduce where a reduce-scatter is
            not possible or not faster: `BoundBatch.scattered_dtype` tells which.

        Raises
        ------
        UnsupportedDtypeError, TransportError, InvalidArgumentError
            As `check`, if there is no plan yet.
        """
        signature = _signature(op, arrays, options, axis)
        batch = self._plans.get(signature)
        if options.implementation is CommunicationImplementation.NCCL:  # not part of the signature
            self.check(op, arrays, options)
        if batch is None or not is_current(batch, self._executor):
            self.check(op, arrays, options)
            batch = None if axis is None else self._bind_scatter(op, arrays[0], axis, options)
            if batch is None:
                packs = self._lay_out(op, arrays, options)
                text = describe_all_reduce(op, arrays, options)
                batch = bind_batch(self._executor, op, arrays, packs, lambda n, t: self._choose_one(op, n, t, options), text)
            self._plans[signature] = batch
            if len(self._plans) > BATCHES_KEPT:
                # the oldest, not the least recently used: all ranks must evict the same plan, and ranks on a fast path do not
                # record their use here
                self._plans.popitem(last=False)
                self._num_evicted += 1
        return batch

    @property
    def num_invalidated(self) -> int:
        """How often plans were evicted or lost their memory: the same on all ranks."""
        return self._num_evicted + self._executor.generation

    def has(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
        axis: int | None = None,
    ) -> bool:
        """Return whether there is a plan for such arrays, so that `find` is not a collective call."""
        batch = self._plans.get(_signature(op, arrays, options, axis))
        return batch is not None and is_current(batch, self._executor)

    def explain(self, arrays: Sequence[Array], options: CommunicationOptions) -> Explanation:
        """Return how a sum of such arrays is computed, and how long the last sum or mean took."""
        packs = []
        for dtype, members, layout in self._lay_out(ReduceOp.SUM, arrays, options):
            choice = self.choose(layout.count, dtype, options)
            packs.append(Pack(members, _bucket_dtype(choice.plan, dtype).name, choice, self.model))
        batches = [self._plans.get(_signature(op, arrays, options)) for op in _WIRE_OPS]
        seconds = [batch.seconds for batch in batches if batch and not _is_one_call(batch)]
        return Explanation(self._world, tuple(packs), self.model, next(filter(None, seconds), None))

    def check(self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions) -> None:
        """Check that arrays can be combined with these options.

        Raises
        ------
        UnsupportedDtypeError
            If `op` is not defined for a dtype.
        TransportError
            If the options ask for NCCL, and it cannot be used.
        InvalidArgumentError
            If they ask for a wire dtype and for an algorithm without a phase between nodes.
        """
        for index, array in enumerate(arrays):
            check_dtype(op, array.dtype, f"array {index}")
            if options.implementation is CommunicationImplementation.NCCL:
                refusal = self._executor.nccl_refusal(self._combined_in(op, array.dtype, options), op)
                if refusal:
                    raise TransportError(f"NCCL was asked for, but {refusal}; implementation AUTO or RING is accepted")
        if options.wire_dtype in WIRE_DTYPES and options.algorithm == "flat" and self._world.num_nodes > 1:
            raise InvalidArgumentError(
                f"wire_dtype={options.wire_dtype!r} needs a step between nodes, which algorithm 'flat' does not have; accepted "
                "are auto, hierarchical, or wire_dtype='native'"
            )

    def choose(self, count: int, dtype: np.dtype[Any], options: CommunicationOptions) -> Choice:
        """Return the plan for a sum of `count` elements, and why it was chosen."""
        dtype = self._combined_in(ReduceOp.SUM, dtype, options)
        return self._choice(ReduceOp.SUM, count, dtype, options, _wire(ReduceOp.SUM, dtype, options))

    def memory(self) -> MemoryReport:
        """Return the memory of the executor and the plans."""
        batches = list(self._plans.values())
        return MemoryReport(
            self._executor.hierarchy.rank,
            self._executor.window_bytes,
            self._executor.rail_bytes,
            sum(bucket.bound.scratch_bytes for batch in batches for bucket in batch),
            len(batches),
            self._executor.largest_pack_bytes,
        )

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()

    def _combined_in(self, op: ReduceOp, dtype: np.dtype[Any], options: CommunicationOptions) -> np.dtype[Any]:
        """Return the dtype in which arrays of a dtype are combined."""
        return accumulation_dtype(op, dtype)

    def _lay_out(self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions) -> list[LaidOut]:
        """Return which arrays share a bucket."""
        dtypes = [self._combined_in(op, array.dtype, options) for array in arrays]
        return lay_out([array.size for array in arrays], dtypes, options)

    def _choose_one(
        self, op: ReduceOp, count: int, dtype: np.dtype[Any], options: CommunicationOptions
    ) -> tuple[Plan, np.dtype[Any], Wire | None]:
        """Return the plan for a bucket, its dtype, and its wire dtype between nodes."""
        wire = _wire(op, dtype, options)
        choice = self._choice(op, count, dtype, options, wire)
        self._say(f"{op.name} of {count} elements: {choice.plan}; {choice.reason}")
        crosses_nodes = any(phase.scope is Scope.INTER for phase in choice.plan.phases)
        return choice.plan, _bucket_dtype(choice.plan, dtype), wire if crosses_nodes else None

    def _bind_scatter(self, op: ReduceOp, array: Array, axis: int, options: CommunicationOptions) -> BoundBatch | None:
        """Bind the plan of a reduce-scatter; return None, on all ranks, if an all-reduce is used instead."""
        dtype = self._combined_in(op, array.dtype, options)
        if options.deterministic or (_wire(op, dtype, options) is not None and self._world.num_nodes > 1):
            return None
        row_count = array.size // max(array.shape[axis], 1)
        bounds = [row_count * row for row in part_bounds(array.shape[axis], self._world.size)]
        bound = self._scatter(op, dtype, bounds, options)
        if bound is None:
            return None
        self._say(f"{op.name} of {array.size} elements, divided along axis {axis}: {bound.plan}")
        batch = BoundBatch([Bucket((0,), bound)])
        batch.scattered_dtype = dtype
        return batch

    def _scatter(
        self, op: ReduceOp, dtype: np.dtype[Any], bounds: Sequence[int], options: CommunicationOptions
    ) -> BoundScatter | DeviceScatter | None:
        """Return what gives rank r elements ``bounds[r]:bounds[r + 1]`` of the combination, if there is something."""
        if not self._executor.scatters:
            return None
        try:
            plan = planners.reduce_scatter(self._world, bounds, dtype.itemsize, options.algorithm or "auto", self._chunk_bytes)
        except Unsuitable:
            return None
        self._executor.reserve_exchange()
        return BoundScatter(self._executor, plan, dtype, op) if self._executor.scatters else None

    def _choice(
        self, op: ReduceOp, count: int, dtype: np.dtype[Any], options: CommunicationOptions, wire: Wire | None
    ) -> Choice:
        """Return the plan for a bucket, and why it was chosen."""
        if options.deterministic:
            return Choice(self._plan_in_order(op, count, dtype), "deterministic=True adds in the order of the replicas", ())
        wire_itemsize = wire.dtype.itemsize if wire else 0
        return self._best(count, dtype.itemsize, options.algorithm or "auto", wire_itemsize)

    def _best(self, count: int, itemsize: int, algorithm: str, wire_itemsize: int) -> Choice:
        """Return the best plan for this memory, where addends may be summed in any order."""
        return choose(self._world, count, itemsize, algorithm, self._chunk_bytes, self.model, wire_itemsize)

    def _plan_in_order(self, op: ReduceOp, count: int, dtype: np.dtype[Any]) -> Plan:
        """Return a plan that adds in the order of the replicas: inside one node, or by an exchange between all."""
        if self._world.num_nodes > 1 or self._world.size == 1 or not self._executor.adds_in_order(dtype, op):
            [plan] = planners.flat(self._world, count, dtype.itemsize)
            return replace(plan, in_order=True)
        *_, plan = planners.hierarchical(self._world, count, dtype.itemsize, self._chunk_bytes)  # in chunks
        return replace(plan, phases=(Phase(Verb.ALL_REDUCE, Scope.INTRA),), in_order=True)


def _bucket_dtype(plan: Plan, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a plan's buckets: float32 if its elements have four bytes, although arrays of two were given."""
    return dtype if dtype.itemsize == plan.itemsize else np.dtype(np.float32)


def _wire(op: ReduceOp, dtype: np.dtype[Any], options: CommunicationOptions) -> Wire | None:
    """Return the wire dtype for values that are summed in `dtype`, if any."""
    if options.wire_dtype in WIRE_DTYPES and op in _WIRE_OPS and dtype == np.float32:
        return Wire(np.dtype(options.wire_dtype), bool(options.error_feedback))
    return None


def _signature(
    op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions, axis: int | None = None
) -> tuple[Any, ...]:
    # only the options that determine a plan: ranks may differ in the others
    shaping = options.algorithm, options.bytes_per_pack, options.wire_dtype, options.error_feedback, options.deterministic
    return (op, *shaping, options.intra_dtype, options.num_packs, axis, *[(array.shape, array.dtype) for array in arrays])


def _is_one_call(batch: BoundBatch) -> bool:
    """Return whether later calls may skip the plan for one call of MPI, which is not timed."""
    return len(batch) == 1 and batch[0].bound.flat_count > 0
