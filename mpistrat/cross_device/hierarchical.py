"""HierarchicalAllReduce: many arrays through few buffers, over the hierarchy of nodes and ranks.

The first call with arrays of certain shapes and dtypes chooses the plans, lays out the buckets and binds the memory; that
recipe is kept, and the next call like it only runs it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.algorithms.choose import Choice, choose
from mpistrat.algorithms.plan import Plan
from mpistrat.arrays import Array
from mpistrat.cross_device.gather import gather_extents
from mpistrat.cross_device.ops import CrossDeviceOps, check_gather, check_out
from mpistrat.cross_device.options import CommunicationImplementation, CommunicationOptions
from mpistrat.cross_device.recipe import Packing, Recipe, is_current, make_recipe, run_recipe
from mpistrat.errors import InvalidArgumentError, MpistratError, TransportError
from mpistrat.execution.bound_plan import BoundPlan, DirectPlan
from mpistrat.execution.executor import Executor
from mpistrat.execution.work import Work
from mpistrat.groups.agreement import Agreement
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype
from mpistrat.transports.base import Steps, drive
from mpistrat.transports.mpi import MpiTransport

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["HierarchicalAllReduce"]

RECIPES_KEPT = 64

Signature = tuple[Any, ...]


class HierarchicalAllReduce(CrossDeviceOps):
    """Collectives over all ranks of a hierarchy. Making one is a collective call.

    Parameters
    ----------
    hierarchy : Hierarchy
        The groups to work on; `close` frees them too.
    options : CommunicationOptions, optional
        Hold for every call that does not say otherwise.
    num_packs : int, optional
        Cut the elements of a batch into so many equal packs; 0 reduces each array by itself. None (the default) packs by
        the options' `bytes_per_pack`.

    Raises
    ------
    InvalidArgumentError
        If `num_packs` is negative.
    """

    def __init__(self, hierarchy: Hierarchy, options: CommunicationOptions | None = None, num_packs: int | None = None) -> None:
        if num_packs is not None and num_packs < 0:
            raise InvalidArgumentError(f"num_packs must be None, 0 (each array by itself) or positive; got {num_packs}")
        self._num_packs = num_packs
        self.hierarchy = hierarchy
        self.world, self.rank, self.size = hierarchy.world, hierarchy.rank, hierarchy.world.size
        self._options = self._defaults().merge(options)
        self._executor = Executor(hierarchy)
        self.timeline = self._executor.timeline
        self._bytes = MpiTransport(hierarchy.world_group)
        self._agreement = Agreement(hierarchy.world_group) if settings.STRICT.read() else None
        self._verbose = self.rank == 0 and settings.VERBOSE.read()
        self._say(f"{self.world}: {', '.join(f'{node.name} has ranks {node.ranks}' for node in self.world.nodes)}")
        self._recipes: OrderedDict[Signature, Recipe] = OrderedDict()
        # one small array by MPI's own all-reduce is the commonest call: where ranks share cores each line of ours counts
        self._allreduce = hierarchy.world_group.comm.Allreduce
        self._direct: dict[tuple[str, int, int], MPI.Op] = {}
        # the arrays of the last such call with `out`: what was checked once holds as long as they are the same objects
        self._last: tuple[Array, Array, ReduceOp, MPI.Op] | None = None
        # hashing options is slow: each set of them gets a number, which stands for it in a signature
        self._merged: dict[CommunicationOptions, tuple[int, CommunicationOptions]] = {}

    def all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Combine each array across replicas: see `CrossDeviceOps.all_reduce`. A collective call.

        Raises
        ------
        UnsupportedDtypeError
            If `op` is not defined for a dtype.
        AgreementError
            In strict mode, on every replica, if replicas pass different things.
        DeadlineExceededError
            If the options have a deadline and it passes.
        """
        if len(arrays) == 1 and options is None and not self.timeline.enabled:
            source, last = arrays[0], self._last
            if out and last is not None and source is last[0] and out[0] is last[1] and op is last[2] and len(out) == 1:
                self._allreduce(source, last[1], last[3])
                return [last[1]]
            native = self._direct.get((op._value_, source.size, source.dtype.num))
            fits = out is None or (len(out) == 1 and _is_fit(out[0], source))
            if native is not None and source.flags.c_contiguous and source.dtype.isnative and fits:
                target = np.empty(source.shape, source.dtype) if out is None else out[0]
                self._allreduce(source, target, native)
                self._last = None if out is None else (source, target, op, native)
                return [target]
        steps, results, wanted = self._begin(op, arrays, options, out)
        drive(steps, lambda: self._describe(op, arrays, wanted), wanted.timeout_seconds or 0.0)
        return results

    def start_all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
    ) -> Work[list[Array]]:
        """Start what `all_reduce` does and return its handle. A collective call; one may be under way at a time."""
        steps, results, wanted = self._begin(op, arrays, options, out)
        return Work(steps, lambda: results, lambda: self._describe(op, arrays, wanted), wanted.timeout_seconds or 0.0)

    def _begin(
        self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions | None, out: Sequence[Array] | None
    ) -> tuple[Steps, list[Array], CommunicationOptions]:
        number, wanted = (0, self._options) if options is None else self._merge(options)
        if self._agreement is not None:
            self._agree(self._agreement, op, arrays, wanted, out)
        signature = (op, number, *[(array.shape, array.dtype) for array in arrays])
        recipe = self._recipes.get(signature)
        if recipe is None or not is_current(recipe, self._executor):
            recipe = self._prepare(signature, op, arrays, wanted)
        results = [np.empty(array.shape, array.dtype) for array in arrays] if out is None else check_out(out, arrays)
        return run_recipe(recipe, arrays, results), results, wanted

    def all_gather(self, array: Array, axis: int = 0) -> Array:
        """Concatenate along `axis`, in replica order: see `CrossDeviceOps.all_gather`. A collective call."""
        error: MpistratError | None = None
        try:
            axis = check_gather(array, axis)
            check_dtype(ReduceOp.SUM, array.dtype)
        except MpistratError as refused:
            error = refused
        if self._agreement is not None:
            self._agreement.check(f"all_gather({array.dtype}, {array.ndim} axes, axis={axis})", error)
        elif error is not None:
            raise error
        extents = gather_extents(self.hierarchy.world_group, array, axis)
        front = np.moveaxis(array, axis, 0)
        whole = np.empty((sum(extents), *front.shape[1:]), array.dtype)
        starts = np.cumsum([0, *extents])
        whole[starts[self.rank] : starts[self.rank + 1]] = front
        row_bytes = whole.nbytes // max(1, whole.shape[0])
        if whole.nbytes:
            gather = self._bytes.all_gather(whole.reshape(-1).view(np.uint8), [int(start) * row_bytes for start in starts])
            drive(gather.run(), lambda: "all_gather")
        return np.ascontiguousarray(np.moveaxis(whole, 0, axis))

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Return the array of replica `root`: see `CrossDeviceOps.broadcast`. A collective call."""
        if not 0 <= root < self.size:
            raise InvalidArgumentError(f"root must be a replica, 0 to {self.size - 1}; got {root}")
        if self._agreement is not None:
            self._agreement.check(f"broadcast(root={root})")
        shape, dtype = self.hierarchy.world_group.comm.bcast((array.shape, array.dtype), root)
        check_dtype(ReduceOp.SUM, dtype, f"the array of replica {root}")
        result = np.array(array, order="C") if self.rank == root else np.empty(shape, dtype)
        if result.nbytes:
            drive(self._bytes.broadcast(result.reshape(-1).view(np.uint8), root).run(), lambda: "broadcast")
        return result

    def barrier(self) -> None:
        """Wait until all replicas have come here. A collective call."""
        if self._agreement is not None:
            self._agreement.check("barrier()")
        self.hierarchy.world_group.comm.Barrier()

    def choose(self, count: int, dtype: np.dtype[Any], options: CommunicationOptions | None = None) -> Choice:
        """Return the plan, and why, for an all-reduce of `count` elements."""
        wanted = self._options.merge(options)
        itemsize = accumulation_dtype(ReduceOp.SUM, dtype).itemsize
        return choose(self.world, count, itemsize, wanted.algorithm, settings.CHUNK_BYTES.read())

    def close(self) -> None:
        """Free the scratch memory and the communicators. A collective call."""
        self._recipes.clear()
        self._executor.close()
        self.hierarchy.close()

    def _merge(self, options: CommunicationOptions) -> tuple[int, CommunicationOptions]:
        if options not in self._merged:
            self._merged[options] = (len(self._merged) + 1, self._options.merge(options))
        return self._merged[options]

    @staticmethod
    def _defaults() -> CommunicationOptions:
        return CommunicationOptions(
            algorithm=settings.ALGORITHM.read(), timeout_seconds=settings.TIMEOUT_SECONDS.read() or None
        )

    def _agree(
        self,
        agreement: Agreement,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
        out: Sequence[Array] | None,
    ) -> None:
        """Check here what would make a rank fail alone later, and compare the calls of all ranks."""
        error: MpistratError | None = None
        try:
            self._check(op, arrays, options, out)
        except MpistratError as refused:
            error = refused
        agreement.check(self._describe(op, arrays, options), error)

    def _check(
        self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions, out: Sequence[Array] | None = None
    ) -> None:
        if out is not None:
            check_out(out, arrays)
        for index, array in enumerate(arrays):
            check_dtype(op, array.dtype, f"array {index}")
        if options.implementation is CommunicationImplementation.NCCL:
            raise TransportError("NCCL was asked for, but these are host arrays; implementation AUTO or RING is accepted here")

    def _prepare(self, signature: Signature, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions) -> Recipe:
        """Choose plans for arrays like these, and bind them."""
        self._check(op, arrays, options)
        recipe = make_recipe(
            self._executor,
            op,
            arrays,
            Packing(options.bytes_per_pack, self._num_packs),
            lambda n, t: self._chosen(op, n, t, options),
        )
        self._recipes[signature] = recipe
        if self._agreement is None and options is self._options and len(arrays) == 1:
            self._remember_direct(op, arrays[0], recipe[0].bound)
        if len(self._recipes) > RECIPES_KEPT:
            self._direct.clear()
            self._recipes.popitem(last=False)
        return recipe

    def _remember_direct(self, op: ReduceOp, array: Array, bound: BoundPlan | DirectPlan) -> None:
        """Note the MPI operation for arrays like this one, where one call of MPI is all there is to do."""
        flat = isinstance(bound, DirectPlan) and bound.is_flat
        if flat and op is not ReduceOp.MEAN and array.nbytes <= settings.MAX_MESSAGE_BYTES.read():
            self._direct[op._value_, array.size, array.dtype.num] = self._bytes.native_op(op, array.dtype)

    def _chosen(self, op: ReduceOp, count: int, dtype: np.dtype[Any], options: CommunicationOptions) -> Plan:
        choice = self.choose(count, dtype, options)
        self._say(f"{op.name} of {count} elements: {choice.plan}; {choice.reason}")
        return choice.plan

    def _say(self, text: str) -> None:
        if self._verbose:
            print(f"mpistrat: {text}", file=sys.stderr, flush=True)

    @staticmethod
    def _describe(op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions) -> str:
        values = ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
        return f"all_reduce({op.name}, [{values}], algorithm={options.algorithm}, bytes_per_pack={options.bytes_per_pack})"


def _is_fit(target: Array, source: Array) -> bool:
    """Return whether MPI can write to `target` what it makes of `source`; else the longer way says why not, or copies."""
    if target.shape != source.shape or target.dtype is not source.dtype or not target.flags.carray:
        return False
    # arrays that own their memory do not overlap, unless they are one
    owners = source.base is None and target.base is None and source is not target
    return owners or not np.may_share_memory(source, target)
