"""ShortWays: which arrays take one call of MPI or of shared memory, and how, from the second call with their like on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.cross_device.arguments import is_fit
from mpistrat.cross_device.gate import Gate
from mpistrat.cross_device.recipe import Recipe
from mpistrat.cross_device.recipe_book import RECIPES_KEPT
from mpistrat.cross_device.small_batch import SMALL_BATCH_BYTES, OneArray, SmallBatch
from mpistrat.execution.bound_plan import DirectPlan
from mpistrat.execution.executor import Executor
from mpistrat.reduction import ReduceOp, accumulation_dtype
from mpistrat.transports.mpi_world import WorldTransport

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["LIKENESS", "ShortWays"]

LIKENESS = attrgetter("shape", "dtype")
"""What arrays that take one way have in common."""


class ShortWays:
    """Made of the recipes that arrays have taken once.

    Parameters
    ----------
    executor : Executor
        Has the communicator of all ranks.
    gate : Gate
        Lets nothing else in meanwhile.
    native_op : callable
        Returns what MPI calls an operation on a dtype.

    Attributes
    ----------
    known : dict
        The ways, by the name of the operation and `LIKENESS` of each array.
    """

    def __init__(self, executor: Executor, gate: Gate, native_op: Callable[[ReduceOp, Any], MPI.Op]) -> None:
        self._executor, self._gate, self._native_op = executor, gate, native_op
        self.known: dict[tuple[Any, ...], OneArray | SmallBatch] = {}
        # of the last call with `out`: what was checked once holds as long as the arrays are the same objects
        self._last: tuple[Array, Array, ReduceOp, OneArray] | None = None

    def learn(self, op: ReduceOp, arrays: Sequence[Array], recipe: Recipe) -> None:
        """Note how arrays like these go straight through MPI or shared memory, where one call of it is all there is to do."""
        if len(recipe) != 1:
            return
        bound, dtype = recipe[0].bound, accumulation_dtype(op, arrays[0].dtype)
        at_once = bound.at_once if isinstance(bound, DirectPlan) else None
        nbytes = bound.flat_count * dtype.itemsize  # as they are sent
        if at_once is None and not 0 < nbytes <= settings.MAX_MESSAGE_BYTES.read():
            return
        if len(self.known) >= RECIPES_KEPT:
            self.known.clear()
        signature = (op._value_, *map(LIKENESS, arrays))
        native, size = self._native_op(op, dtype), self._executor.hierarchy.world.size
        if at_once is not None:
            self.known[signature] = OneArray(op, 1, native, self._called_as_mpi(at_once, recipe))  # divided already
            return
        world = self._executor.world
        assert isinstance(world, WorldTransport), "only MPI works on arrays of the caller"
        allreduce = world.call(nbytes)
        if len(arrays) == 1 and dtype == arrays[0].dtype:
            self.known[signature] = OneArray(op, size, native, allreduce)
        elif sum(array.nbytes for array in arrays) <= SMALL_BATCH_BYTES and len({array.dtype for array in arrays}) == 1:
            self.known[signature] = SmallBatch(op, arrays, recipe[0], size, native, allreduce)

    def into(self, op: ReduceOp, source: Array, target: Array) -> OneArray | None:
        """Return the way of one array into memory of the caller, if there is one; for operations that do not divide."""
        last = self._last
        if last is not None and source is last[0] and target is last[1] and op is last[2]:
            return last[3]
        way = self.known.get((op._value_, (source.shape, source.dtype)))
        if not isinstance(way, OneArray) or not source.flags.c_contiguous or not is_fit(target, source):
            return None
        # larger ones must not be kept alive, and to look at them again takes little of their time
        if source.nbytes <= SMALL_BATCH_BYTES:
            self._last = source, target, op, way
        return way

    def forget(self) -> None:
        """Forget all ways."""
        self.known.clear()
        self._last = None

    def _called_as_mpi(self, at_once: Callable[[Array, Array], None], recipe: Recipe) -> Callable[..., None]:
        """Return the same, called as MPI's is."""

        def run(source: Array, target: Array, _: MPI.Op) -> None:
            started = time.perf_counter()
            self._gate.run_at_once("all_reduce", at_once, source, target)
            recipe.seconds = time.perf_counter() - started

        return run
