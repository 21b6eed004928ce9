"""HierarchicalCollectives: many arrays through few buffers, over the hierarchy of nodes and ranks.

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
from mpistrat.cross_device.collectives import Collectives, apart, check_gather, check_out, is_fit
from mpistrat.cross_device.gather import gather_extents
from mpistrat.cross_device.options import CommunicationImplementation, CommunicationOptions, shared_defaults
from mpistrat.cross_device.recipe import Packing, Recipe, is_current, make_recipe, run_recipe
from mpistrat.errors import InvalidArgumentError, MpistratError, TransportError, UnavailableError
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

__all__ = ["HierarchicalCollectives"]

RECIPES_KEPT = 64

Signature = tuple[Any, ...]


class HierarchicalCollectives(Collectives):
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
        self._agreement = Agreement(hierarchy.world_group)
        self._options = shared_defaults(self._agreement).merge(options)
        self._chunk_bytes = settings.CHUNK_BYTES.read()
        self._executor = Executor(hierarchy)
        self.timeline = self._executor.timeline
        self._bytes = MpiTransport(hierarchy.world_group)
        self.is_strict = settings.STRICT.read()
        # why no further collective can be made, or an empty text
        self._refusal = ""
        self._verbose = self.rank == 0 and settings.VERBOSE.read()
        self._say(f"{self.world}: {', '.join(f'{node.name} has ranks {node.ranks}' for node in self.world.nodes)}")
        self._recipes: OrderedDict[Signature, Recipe] = OrderedDict()
        # one small array by MPI's own all-reduce is the commonest call: where ranks share cores each line of ours counts
        self._allreduce = hierarchy.world_group.comm.Allreduce
        self._direct: dict[tuple[str, int, int], MPI.Op] = {}
        # the arrays of the last such call with `out`: what was checked once holds as long as they are the same objects
        self._last: tuple[Array, Array, ReduceOp, MPI.Op] | None = None
        self._merged: dict[CommunicationOptions, CommunicationOptions] = {}

    def all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Combine each array across replicas: see `Collectives.all_reduce`. A collective call.

        Raises
        ------
        UnsupportedDtypeError
            If `op` is not defined for a dtype.
        AgreementError
            In strict mode, on every replica, if replicas pass different things.
        DeadlineExceededError
            If the options have a deadline and it passes.
        """
        if len(arrays) == 1 and options is None and not self.timeline.enabled and not self._refusal:
            source, last = arrays[0], self._last
            if out and last is not None and source is last[0] and out[0] is last[1] and op is last[2] and len(out) == 1:
                self._allreduce(source, last[1], last[3])
                return [last[1]]
            native = self._direct.get((op._value_, source.size, source.dtype.num))
            fits = out is None or (len(out) == 1 and is_fit(out[0], source))
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
        self._refusal = "an earlier all_reduce is still under way: wait for it first"
        return Work(steps, lambda: results, lambda: self._describe(op, arrays, wanted), wanted.timeout_seconds or 0.0)

    def _begin(
        self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions | None, out: Sequence[Array] | None
    ) -> tuple[Steps, list[Array], CommunicationOptions]:
        self._require_intact()
        wanted = self._options if options is None else self._merge(options)
        if self.is_strict:
            self._agree_on_all_reduce(op, arrays, wanted, out)
        elif wanted.implementation is CommunicationImplementation.NCCL:
            self._check(op, arrays, wanted)
        # of the options only what shapes a recipe: ranks may differ in the others
        signature = (op, wanted.algorithm, wanted.bytes_per_pack, *[(array.shape, array.dtype) for array in arrays])
        recipe = self._recipes.get(signature)
        if recipe is None or not is_current(recipe, self._executor):
            recipe = self._prepare(signature, op, arrays, wanted)
        if out is None:
            results = [np.empty(array.shape, array.dtype) for array in arrays]
        else:
            results = check_out(out, arrays)
            arrays = apart(arrays, results)
        return self._guarded(run_recipe(recipe, arrays, results)), results, wanted

    def _guarded(self, steps: Steps) -> Steps:
        """Return the steps; while they are under way, and for ever if they fail, no other collective can be made."""
        self._refusal = "an earlier all_reduce is still under way: wait for it first"
        try:
            yield from steps
        except BaseException as error:
            name = type(error).__name__
            self._refusal = f"an earlier all_reduce did not end ({name}), and ranks may be out of step; make a new strategy"
            raise
        self._refusal = ""

    def _require_intact(self) -> None:
        if self._refusal:
            raise UnavailableError(f"rank {self.rank}: no further collective can be made: {self._refusal}")

    def all_gather(self, array: Array, axis: int = 0) -> Array:
        """Concatenate along `axis`, in replica order: see `Collectives.all_gather`. A collective call."""
        self._require_intact()
        call = f"all_gather({array.dtype}, {array.ndim} axes, axis={axis})"
        try:
            axis = check_gather(array, axis)
            check_dtype(ReduceOp.SUM, array.dtype)
        except MpistratError as error:
            self.refuse(call, error)
        if self.is_strict:
            self.agree(call)
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
        """Return the array of replica `root`: see `Collectives.broadcast`. A collective call."""
        self._require_intact()
        if not 0 <= root < self.size:
            problem = f"root must be a replica, 0 to {self.size - 1}; got {root}"
            self.refuse(f"broadcast(root={root})", InvalidArgumentError(problem))
        if self.is_strict:
            self.agree(f"broadcast(root={root})")
        shape, dtype = self.hierarchy.world_group.comm.bcast((array.shape, array.dtype), root)
        check_dtype(ReduceOp.SUM, dtype, f"the array of replica {root}")
        result = np.array(array, order="C") if self.rank == root else np.empty(shape, dtype)
        if result.nbytes:
            drive(self._bytes.broadcast(result.reshape(-1).view(np.uint8), root).run(), lambda: "broadcast")
        return result

    def barrier(self) -> None:
        """Wait until all replicas have come here. A collective call."""
        self._require_intact()
        if self.is_strict:
            self.agree("barrier()")
        self.hierarchy.world_group.comm.Barrier()

    def agree(self, call: str, error: Exception | None = None) -> None:
        """Check that all replicas pass the same text: see `Collectives.agree`. A collective call."""
        self._require_intact()
        self._agreement.check(call, error)

    def choose(self, count: int, dtype: np.dtype[Any], options: CommunicationOptions | None = None) -> Choice:
        """Return the plan, and why, for an all-reduce of `count` elements."""
        wanted = self._options.merge(options)
        itemsize = accumulation_dtype(ReduceOp.SUM, dtype).itemsize
        return choose(self.world, count, itemsize, wanted.algorithm, self._chunk_bytes)

    def close(self) -> None:
        """Free the scratch memory and the communicators. A collective call."""
        self._recipes.clear()
        self._direct.clear()
        self._last = None
        self._executor.close()
        self.hierarchy.close()

    def _merge(self, options: CommunicationOptions) -> CommunicationOptions:
        """Return options merged over ours; merging is slow, so the last few are kept."""
        if options not in self._merged:
            if len(self._merged) == RECIPES_KEPT:
                self._merged.clear()
            self._merged[options] = self._options.merge(options)
        return self._merged[options]

    def _agree_on_all_reduce(
        self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions, out: Sequence[Array] | None
    ) -> None:
        """Check here what would make a rank fail alone later, and compare the calls of all ranks."""
        call = self._describe(op, arrays, options)
        try:
            self._check(op, arrays, options, out)
        except MpistratError as error:
            self.refuse(call, error)
        self.agree(call)

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
        if not self.is_strict and options is self._options and len(arrays) == 1:
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
