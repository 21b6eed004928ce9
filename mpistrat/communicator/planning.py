"""Planner: which buckets and plans the arrays of a call get, in host memory or on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from mpistrat import settings
from mpistrat.algorithms import planners
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.algorithms.planners import NOTHING, Choice, Measured, choose, choose_on_gpus
from mpistrat.arrays import Array, is_on_device, part_bounds
from mpistrat.communicator.explain import Explanation, Pack
from mpistrat.communicator.gpu_arrays import DeviceProgram, GpuArrays
from mpistrat.communicator.options import (
    NATIVE,
    WIRE_DTYPES,
    CommunicationImplementation,
    CommunicationOptions,
    shaping_values,
    text_of_shaping,
)
from mpistrat.device.kernels import divide_kernel
from mpistrat.errors import InvalidArgumentError, TransportError
from mpistrat.execution.compile import Bucket, all_reduce, reduce_scatter
from mpistrat.execution.device_executor import DeviceExecutor
from mpistrat.execution.executor import BucketSpec, Executor
from mpistrat.execution.program import Program, shorten
from mpistrat.packing import Layout, pack_by_bytes, split_evenly
from mpistrat.reduction import HALF_DTYPES, Fold, ReduceOp, accumulation_dtype, check_dtype

WIRE_OPS = (ReduceOp.SUM, ReduceOp.MEAN)
_ROUNDING_OPS = (*WIRE_OPS, ReduceOp.PROD)

_TEXTS_KEPT = 256


@dataclass(eq=False)
class Reduction:
    """An all-reduce of arrays, or a reduce-scatter of one along an `axis`; its text must be the same on all ranks."""

    op: ReduceOp
    arrays: Sequence[Array]
    options: CommunicationOptions  # merged over those of the communicator
    axis: int | None = None

    def __post_init__(self) -> None:
        # what is told of it: the values of the options that shape a program, and of the arrays
        self._shaping = shaping_values(self.options)
        self._told = tuple([(each.dtype, each.shape, is_on_device(each)) for each in self.arrays])

    @property
    def kind(self) -> object:
        """What the calls that a rank remembers are told apart by, besides arrays and options."""
        return self.op._value_ if self.axis is None else (self.op._value_, self.axis)

    @property
    def key(self) -> tuple[Any, ...]:
        """What has a program of its own, the same on all ranks: they may differ in the options that shape none."""
        axis = None if self.axis is None else self.axis % self.arrays[0].ndim
        return axis, self.op._value_, self._shaping, self._told

    def __str__(self) -> str:
        along = "" if self.axis is None else f"axis={self.axis}, "
        return f"({self.op._name_}, [{_text_of_arrays(self._told)}], {along}{text_of_shaping(self._shaping)})"


@lru_cache(_TEXTS_KEPT)
def _text_of_arrays(told: tuple[Any, ...]) -> str:
    return ", ".join([f"{dtype} {shape}{' on a GPU' if on_gpu else ''}" for dtype, shape, on_gpu in told])


class Planner:
    """Chooses plans for arrays in host memory, and compiles them. `say` logs which plan was chosen, and why."""

    default_chunk_bytes = 0  # of plans in order, without MPISTRAT_CHUNK_BYTES; 0: the algorithm chooses

    def __init__(self, executor: Executor, say: Callable[[str], None], measured: Measured = NOTHING) -> None:
        self.executor, self._world, self._say, self._measured = executor, executor.hierarchy.world, say, measured
        self._chunk_bytes = executor.hierarchy.settings[settings.CHUNK_BYTES]

    def check(self, asked: Reduction) -> None:
        """Check that its arrays can be combined with its options."""
        op, options = asked.op, asked.options
        for index, array in enumerate(asked.arrays):
            check_dtype(op, array.dtype, f"array {index}")
            if options.implementation is CommunicationImplementation.NCCL:
                refusal = self.executor.nccl_refusal(self._combined_in(op, array.dtype, options), op)
                if refusal:
                    raise TransportError(f"NCCL was asked for, but {refusal}; implementation AUTO or RING is accepted")
        if options.wire_dtype in WIRE_DTYPES and options.algorithm == "flat" and self._world.num_nodes > 1:
            raise InvalidArgumentError(
                f"wire_dtype={options.wire_dtype!r} needs a step between nodes, which algorithm 'flat' does not have; accepted "
                "are auto, hierarchical, or wire_dtype='native'"
            )

    def compile(self, asked: Reduction, settle: Callable[[], None]) -> Program:
        """Choose plans for arrays of these shapes and dtypes, and bind them. A collective call.

        `settle` waits for what GPUs were given: memory that this uses may be freed. That of a reduce-scatter is an all-reduce
        where another one is not possible or not faster: `Program.scattered_dtype` tells which.
        """
        found = None if asked.axis is None else self._compile_scatter(asked, asked.arrays[0], asked.axis, settle)
        if found is not None:
            self._shorten(found, asked)
            return found
        while True:  # enlarging the scratch memory for a later bucket unbinds the earlier ones; then it is large enough for all
            program = self._program(asked, [self._bind(asked.options, pack, settle) for pack in self._lay_out(asked)])
            if program.is_current:
                break
        self._shorten(program, asked)
        return program

    def _program(self, asked: Reduction, buckets: Sequence[Bucket]) -> Program:
        return Program(self.executor, buckets, asked.arrays)

    def _shorten(self, program: Program, asked: Reduction) -> None:
        """Give a program its blocking call, if it is a single one."""
        shorten(program, self.executor, asked.op, asked.arrays)

    def _bind(self, options: CommunicationOptions, pack: BucketSpec, settle: Callable[[], None]) -> Bucket:
        """Choose the plan of a bucket, and bind it. A collective call."""
        choice, pack = self._decide(pack, options)
        self._say(f"{pack.op.name} of {pack.layout.count} elements: {choice.plan}; {choice.reason}")
        # NCCL takes arrays as they lie: nothing is freed for that
        if self.executor.device is None or not choice.plan.is_direct:
            settle()
        return all_reduce(self.executor, choice.plan, pack)

    def _decide(self, pack: BucketSpec, options: CommunicationOptions) -> tuple[Choice, BucketSpec]:
        """Return the plan of a bucket as it will run, and why it was chosen; and the bucket in the dtype that it will have."""
        choice = self._choice(pack, options)
        if pack.dtype.itemsize != choice.plan.itemsize:  # its elements have four bytes, although arrays of two were given
            pack = replace(pack, dtype=np.dtype(np.float32))
        return replace(choice, plan=self.executor.adapt(choice.plan, pack)), pack

    def _compile_scatter(self, asked: Reduction, array: Array, axis: int, settle: Callable[[], None]) -> Program | None:
        """Bind the plan of a reduce-scatter; return None, on all ranks, if an all-reduce is used instead."""
        op, options = asked.op, asked.options
        dtype = self._combined_in(op, array.dtype, options)
        if options.deterministic or (_wire(op, dtype, options) is not None and self._world.num_nodes > 1):
            return None
        row_count = array.size // max(array.shape[axis], 1)
        bounds = [row_count * row for row in part_bounds(array.shape[axis], self._world.size)]
        if self.executor.device is None:
            settle()
        program = self._scatter(asked, dtype, bounds)
        if program is not None:
            how = program.buckets[0].plan if program.buckets else "by NCCL"
            self._say(f"{op.name} of {array.size} elements, divided along axis {axis}: {how}")
            program.scattered_dtype = dtype
        return program

    def _scatter(self, asked: Reduction, dtype: np.dtype[Any], bounds: Sequence[int]) -> Program | None:
        """Return what gives rank r elements ``bounds[r]:bounds[r + 1]`` of the combination, if there is something."""
        if not self.executor.scatters:
            return None
        algorithm = asked.options.algorithm or "auto"
        plan = planners.reduce_scatter(self._world, bounds, dtype.itemsize, algorithm, self._chunk_bytes)
        if plan is None:
            return None
        self.executor.reserve_exchange(self._world.size)
        scatters = self.executor.scatters  # its memory may be too large for shared memory
        return self._program(asked, [reduce_scatter(self.executor, plan, dtype, asked.op)]) if scatters else None

    def explain(self, asked: Reduction) -> Explanation:
        """Return how a sum is computed."""
        packs = []
        for choice, pack in [self._decide(pack, asked.options) for pack in self._lay_out(asked)]:
            path = self.executor.path_of(choice.plan, pack.dtype, pack.op)
            packs.append(Pack(pack.indices, pack.dtype.name, choice, path))
        return Explanation(self._world, tuple(packs), self._measured.source)

    def _combined_in(self, op: ReduceOp, dtype: np.dtype[Any], options: CommunicationOptions) -> np.dtype[Any]:
        """Return the dtype in which arrays of a dtype are combined."""
        return accumulation_dtype(op, dtype)

    def _lay_out(self, asked: Reduction) -> list[BucketSpec]:
        """Return which arrays share a bucket."""
        op, options, by_dtype = asked.op, asked.options, dict[np.dtype[Any], list[int]]()
        for index, array in enumerate(asked.arrays):
            by_dtype.setdefault(self._combined_in(op, array.dtype, options), []).append(index)
        counts, dtypes = [array.size for array in asked.arrays], [array.dtype for array in asked.arrays]
        return [
            BucketSpec(op, dtype, members, layout, [dtypes[index] for index in members], _wire(op, dtype, options))
            for dtype, indices in by_dtype.items()
            # backpropagation computes the last gradients first, so they are packed first
            for members, layout in _pack(indices[::-1], counts, dtype.itemsize, options)
        ]

    def _choice(self, pack: BucketSpec, options: CommunicationOptions) -> Choice:
        """Return the plan for a bucket, and why it was chosen."""
        op, count, dtype = pack.op, pack.layout.count, pack.dtype
        if options.deterministic:
            plan = planners.flat(self._world, count, dtype.itemsize)
            # buckets are padded
            if self.executor.device is None and self.executor.world.bind(op, dtype, (plan.padded(count),)).adds_in_order:
                return Choice(plan, "small arrays of a node are always added in the order of the replicas")
            return Choice(self._plan_in_order(op, count, dtype), "deterministic=True adds in the order of the replicas")
        buffer, algorithm = (self._world, count, dtype.itemsize), options.algorithm or "auto"
        return choose(*buffer, algorithm, self._chunk_bytes, self._measured, pack.wire.itemsize if pack.wire else 0)

    def _plan_in_order(self, op: ReduceOp, count: int, dtype: np.dtype[Any]) -> Plan:
        """Return a plan that adds in the order of the replicas: inside one node, or by an exchange between all."""
        if self._world.num_nodes > 1 or self._world.size == 1 or not self.executor.adds_in_order(dtype, op):
            return replace(planners.flat(self._world, count, dtype.itemsize), in_order=True)
        plan = planners.hierarchical(self._world, count, dtype.itemsize, self._chunk_bytes or self.default_chunk_bytes)
        return replace(plan, phases=(Phase(Verb.ALL_REDUCE, Scope.INTRA),), in_order=True)


class DevicePlanner(Planner):
    """Chooses plans for arrays on GPUs, and compiles them."""

    default_chunk_bytes = planners.DEVICE_CHUNK_BYTES
    executor: DeviceExecutor

    def __init__(self, gpu: GpuArrays, say: Callable[[str], None]) -> None:
        super().__init__(gpu.executor, say)
        self._gpu = gpu

    def _program(self, asked: Reduction, buckets: Sequence[Bucket]) -> Program:
        return DeviceProgram(self._gpu, buckets, asked.arrays)

    def _shorten(self, program: Program, asked: Reduction) -> None:
        """Give a program its call of NCCL, if it is a single one, of one array as it is."""
        nccl = self.executor.transports.everywhere
        if nccl is None or not len(program.buckets) == len(asked.arrays) == 1:
            return
        [bucket], [array] = program.buckets, asked.arrays
        if asked.axis is None and bucket.plan.is_direct and bucket.plan.phases:
            calls, fold = nccl.all_reduce_calls(array.size, array.dtype, asked.op), self._fold(asked.op, array.dtype)
            program.blocking = self._gpu.by_nccl(nccl.bind(calls, array.size, fold), (array.shape, array.dtype), in_place=True)

    def _scatter(self, asked: Reduction, dtype: np.dtype[Any], bounds: Sequence[int]) -> Program | None:
        op, nccl, [array], axis = asked.op, self.executor.transports.everywhere, asked.arrays, asked.key[0]
        if nccl is None or nccl.refusal(dtype, op):
            return None
        first, last, *_ = part_bounds(array.shape[axis], self._world.size)[self.executor.hierarchy.rank :]
        before, after, program = array.shape[:axis], array.shape[axis + 1 :], self._program(asked, [])
        program.scattered_shape, moved = (*before, last - first, *after), (last - first, *before, *after)
        enqueue = nccl.bind(nccl.scatter_calls(bounds, dtype, op), prod(moved), self._fold(op, dtype))
        program.blocking = run = self._gpu.by_nccl(enqueue, (moved, dtype), in_place=False)
        if axis or dtype != array.dtype:
            program.blocking = self._gpu.along(axis, program.scattered_shape, dtype, run)
        return program

    def _fold(self, op: ReduceOp, dtype: np.dtype[Any]) -> Fold:
        """Return how NCCL's result is divided; its kernel is loaded."""
        if op is ReduceOp.MEAN:
            self.executor.device.prepare(divide_kernel(dtype))
        return Fold(op, dtype, self.executor.divisor(op))

    def _combined_in(self, op: ReduceOp, dtype: np.dtype[Any], options: CommunicationOptions) -> np.dtype[Any]:
        is_native = options.intra_dtype == NATIVE and op in _ROUNDING_OPS and dtype in HALF_DTYPES
        if is_native and self.executor.transports.combine_halves:
            return dtype
        return super()._combined_in(op, dtype, options)

    def _choice(self, pack: BucketSpec, options: CommunicationOptions) -> Choice:
        op, count, dtype, wire = pack.op, pack.layout.count, pack.dtype, pack.wire
        nccl = self.executor.transports.everywhere
        is_summed = wire is None and not options.deterministic
        by_nccl = nccl is not None and is_summed and not nccl.refusal(dtype, op)
        joins_nodes = nccl is not None and self._world.num_nodes > 1
        if joins_nodes and by_nccl and options.algorithm == "auto":
            plan = planners.flat(self._world, count, dtype.itemsize)
            return Choice(plan, "nccl joins all ranks, and chooses how")
        if options.deterministic:
            choice = super()._choice(pack, options)
        elif is_summed and self.executor.orders(dtype, op):
            reason = f"NCCL does not combine {dtype} by {op.name} as NumPy does: GPUs exchange and combine them"
            choice = Choice(self._plan_in_order(op, count, dtype), reason)
        else:
            buffer, wire_itemsize = (self._world, count, dtype.itemsize), wire.itemsize if wire else 0
            choice = choose_on_gpus(*buffer, options.algorithm or "auto", self._chunk_bytes, wire_itemsize)
        if dtype in HALF_DTYPES and not by_nccl:
            choice = _without_halves_in_mpi(choice)
        if not by_nccl or self._world.num_nodes == 1:
            return choice
        # kernels of several communicators run one after the other, in an order that depends on nothing else
        return replace(choice, plan=replace(choice.plan, depth=1))


def _pack(
    indices: list[int], counts: Sequence[int], itemsize: int, options: CommunicationOptions
) -> Iterator[tuple[tuple[int, ...], Layout]]:
    """Yield the indices of the arrays of each bucket, and their layout."""
    sizes = [counts[index] for index in indices]
    if options.num_packs:
        first = 0
        for count in split_evenly(sum(sizes), options.num_packs):
            yield tuple(indices), Layout(sizes, first, count)
            first += count
        return
    alone = [[position] for position in range(len(indices))]
    packs = alone if options.num_packs == 0 else pack_by_bytes([size * itemsize for size in sizes], options.bytes_per_pack)
    for pack in packs:
        yield tuple(indices[position] for position in pack), Layout([sizes[position] for position in pack])


def _wire(op: ReduceOp, dtype: np.dtype[Any], options: CommunicationOptions) -> np.dtype[Any] | None:
    """Return the wire dtype for values that are summed in `dtype`, if any."""
    is_cast = options.wire_dtype in WIRE_DTYPES and op in WIRE_OPS and dtype == np.float32
    return np.dtype(options.wire_dtype) if is_cast else None


def _without_halves_in_mpi(choice: Choice) -> Choice:
    """Return a plan in which MPI reduces no 16-bit floats, which it does not know.

    In the scopes that MPI joins they are exchanged, and added in float32. A plan without a phase inside nodes gains nothing by
    them: its buckets have float32.
    """
    plan, scopes = choice.plan, {phase.scope for phase in choice.plan.phases} & {Scope.WORLD, Scope.INTER}
    if Scope.WORLD in scopes:
        return replace(choice, plan=planners.flat(plan.world, plan.count, np.dtype(np.float32).itemsize))
    return replace(choice, plan=replace(plan, in_order=True)) if scopes else choice
