"""HierarchicalCollectives: many arrays through few buffers, over the hierarchy of nodes and ranks.

The first call with arrays of certain shapes and dtypes chooses the plans, lays out the buckets and binds the memory; that
recipe is kept, and the next call like it only runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.algorithms.choose import Choice
from mpistrat.algorithms.cost import CostModel
from mpistrat.arrays import Array
from mpistrat.cross_device.arguments import apart, check_gather, check_num_packs, check_out, describe, describe_all_reduce
from mpistrat.cross_device.exchange_verbs import ExchangeVerbs
from mpistrat.cross_device.explanation import Explanation
from mpistrat.cross_device.gate import Call
from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.cross_device.recipe import Recipe, run_recipe
from mpistrat.cross_device.recipe_book import RecipeBook
from mpistrat.cross_device.short_ways import LIKENESS, ShortWays
from mpistrat.cross_device.tuning_file import shared_model
from mpistrat.execution.executor import Executor
from mpistrat.execution.memory import MemoryReport
from mpistrat.execution.work import Work
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from mpistrat.transports.base import Steps

if TYPE_CHECKING:
    from mpistrat.cross_device.device_recipes import MixedRecipes

__all__ = ["HierarchicalCollectives"]

# what is started up to here goes through calls of MPI that block, and keep the program's core while a rank is late
MEET_UP_TO_BYTES = 1 << 20


class HierarchicalCollectives(ExchangeVerbs):
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
    model : CostModel, optional
        What ``auto`` chooses by, the same on all ranks; by default what MPISTRAT_TUNING says.

    Raises
    ------
    InvalidArgumentError
        If `num_packs` is negative.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        options: CommunicationOptions | None = None,
        num_packs: int | None = None,
        model: CostModel | None = None,
    ) -> None:
        self._num_packs = check_num_packs(num_packs)
        super().__init__(hierarchy, options)
        self._executor = Executor(hierarchy)
        self._short = ShortWays(self._executor, self._gate, self._bytes.native_op)
        # one small array by MPI's own all-reduce is the commonest call: where ranks share cores each line of ours counts
        self._quick = self._short.known
        self.timeline = self._executor.timeline
        self._verbose = self.rank == 0 and settings.VERBOSE.read()
        self._recipes: RecipeBook | MixedRecipes = RecipeBook(
            self._executor, self._say, shared_model(hierarchy) if model is None else model
        )
        self._say(f"{self.world}: {', '.join(f'{node.name} has ranks {node.ranks}' for node in self.world.nodes)}")

    @property
    def num_packs(self) -> int | None:
        """How a batch is packed: see `Collectives`; a negative number raises InvalidArgumentError."""
        return self._num_packs

    @num_packs.setter
    def num_packs(self, num_packs: int | None) -> None:
        self._num_packs = check_num_packs(num_packs)
        self._short.forget()

    @property
    def model(self) -> CostModel:
        """What ``auto`` chooses by."""
        return self._recipes.model

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
        if options is None:
            results = self.all_reduce_again(op, arrays) if out is None else self._again_into(op, arrays, out)
            if results is not None:
                return results
        call, steps, results = self._begin(op, arrays, options, out)
        self._gate.run(call, steps)
        return results

    def all_reduce_again(self, op: ReduceOp, arrays: Sequence[Array]) -> list[Array] | None:
        """Combine arrays like earlier ones that took one call of MPI: see `Collectives.all_reduce_again`. A collective call."""
        quick = self._quick.get((op._value_, *map(LIKENESS, arrays)))
        if quick is None or self.timeline.enabled or self._gate.refusal:
            return None
        self.num_collectives += 1
        try:
            return quick.run(arrays)
        except BaseException as error:
            self._gate.fail("all_reduce", error)
            raise

    def start_all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        structure: object = None,
    ) -> Work[list[Array]]:
        """Start what `all_reduce` does: see `Collectives.start_all_reduce`. A collective call."""
        # as they are now: what the program does with its list and with `num_packs` afterwards is none of this call
        given, num_packs = list(arrays), self._num_packs

        def check(wanted: CommunicationOptions) -> None:
            self._recipes.check(op, given, wanted)
            if out is not None:
                self._check_out(out, given)

        def arguments(wanted: CommunicationOptions) -> str:
            return describe_all_reduce(op, given, wanted, num_packs) + ("" if structure is None else f" of {structure}")

        self._gate.require_startable()
        call, refused = self._announce("start_all_reduce", arguments, options, check)
        if refused is not None:
            self._gate.require_open()  # in strict mode the others hear of it when the turn of their call comes
            self._meet(call, refused)
        call.is_started = True
        results, sources = self._landing(given, out)
        return self._gate.start(call, self._job(call, op, list(sources), results, num_packs))

    def reduce_scatter(self, op: ReduceOp, array: Array, axis: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Combine arrays, and take this replica's part: see `Collectives.reduce_scatter`. A collective call."""

        def check(wanted: CommunicationOptions) -> None:
            check_gather(array, axis, "reduce_scatter")
            self._recipes.check(op, [array], wanted)

        call = self._enter("reduce_scatter", lambda _: f"({op.name}, {describe([array])}, axis={axis})", options, check)
        total = self._empty(array)
        self._gate.run(
            call, self._steps(call, self._recipes.find(op, [array], call.options, self._num_packs), [array], [total])
        )
        return self._part(total, axis)

    def choose(self, count: int, dtype: np.dtype[Any], options: CommunicationOptions | None = None) -> Choice:
        """Return the plan, and why, for an all-reduce of `count` elements."""
        return self._recipes.choose(count, dtype, self._options.merge(options))

    def explain_batch(self, arrays: Sequence[Array], options: CommunicationOptions | None = None) -> Explanation:
        """Return what a sum of arrays like these does: see `Collectives.explain_batch`."""
        wanted = self._options.merge(options)
        self._recipes.check(ReduceOp.SUM, arrays, wanted)
        return self._recipes.explain(arrays, wanted, self._num_packs)

    def memory_report(self) -> MemoryReport:
        """Return what this rank holds to communicate."""
        self._gate.settle()
        return self._recipes.memory()

    def close(self) -> None:
        """Free the scratch memory and the communicators. A collective call.

        Where a collective has failed, here or on a peer, nothing is freed and nobody waited for: others may still use it.
        """
        self._short.forget()
        self._gate.settle()
        if self._gate.is_broken():
            return
        self._recipes.clear()
        self._executor.close()
        self.hierarchy.close()

    def _begin(
        self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions | None, out: Sequence[Array] | None
    ) -> tuple[Call, Steps, list[Array]]:
        """Enter an all-reduce; return its steps, and the results as they will be afterwards."""

        def check(wanted: CommunicationOptions) -> None:
            # without strict mode and a deadline an array is looked at only where there is no recipe for it yet
            if self.is_strict or wanted.timeout_seconds:
                self._recipes.check(op, arrays, wanted)
                if out is not None:
                    self._check_out(out, arrays)

        call = self._enter(
            "all_reduce", lambda wanted: describe_all_reduce(op, arrays, wanted, self._num_packs), options, check
        )
        recipe = self._recipes.find(op, arrays, call.options, self._num_packs)
        if call.options is self._options and not (self.is_strict or call.ends):
            self._short.learn(op, arrays, recipe)
        results, sources = self._landing(arrays, out)
        return call, self._steps(call, recipe, sources, results), results

    def _landing(self, arrays: Sequence[Array], out: Sequence[Array] | None) -> tuple[list[Array], Sequence[Array]]:
        """Return where results go, and what to combine."""
        if out is None:
            return [np.empty(array.shape, array.dtype) for array in arrays], arrays
        results = check_out(out, arrays)
        return results, apart(arrays, results)

    def _empty(self, array: Array) -> Array:
        """Return a new array like one that is given."""
        return np.empty(array.shape, array.dtype)

    def _part(self, total: Array, axis: int) -> Array:
        """Return this replica's part of an array."""
        parts: list[Array] = np.array_split(total, self.size, axis)
        return np.array(parts[self.rank])

    def _check_out(self, out: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        return check_out(out, arrays)

    def _steps(self, call: Call, recipe: Recipe, sources: Sequence[Array], results: Sequence[Array]) -> Steps:
        """Return the steps that combine `sources` into `results`."""
        return run_recipe(recipe, sources, results)

    def _job(
        self, call: Call, op: ReduceOp, arrays: list[Array], results: list[Array], num_packs: int | None
    ) -> Callable[[], list[Array]]:
        """Return what does on the engine what was started."""
        return partial(self._carry_out, call, op, arrays, results, num_packs)

    def _carry_out(
        self,
        call: Call,
        op: ReduceOp,
        arrays: list[Array],
        results: list[Array],
        num_packs: int | None,
    ) -> list[Array]:
        """Do what was started, on the engine, and return the results."""
        self._gate.require_sound()
        self._meet(call)
        if not (self.is_strict or call.ends) and sum(array.nbytes for array in arrays) <= MEET_UP_TO_BYTES:
            self._gate.arrive(call)
        self._gate.run(call, self._steps(call, self._recipes.find(op, arrays, call.options, num_packs), arrays, results))
        return results

    def _again_into(self, op: ReduceOp, arrays: Sequence[Array], out: Sequence[Array]) -> list[Array] | None:
        """Do what `all_reduce_again` does for one array, which is not to be divided, into memory of the caller."""
        if len(arrays) != 1 or len(out) != 1 or op is ReduceOp.MEAN or self.timeline.enabled or self._gate.refusal:
            return None
        source, target = arrays[0], out[0]
        quick = self._short.into(op, source, target)
        if quick is None:
            return None
        self.num_collectives += 1
        try:
            quick.allreduce(source, target, quick.native)
        except BaseException as error:
            self._gate.fail("all_reduce", error)
            raise
        return [target]

    def _say(self, text: str) -> None:
        if self._verbose:
            print(f"mpistrat: {text}", file=sys.stderr, flush=True)
