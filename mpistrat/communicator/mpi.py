"""MpiCommunicator: many arrays through few buffers, over the hierarchy of nodes and ranks.

The first call with arrays of certain shapes and dtypes chooses the plans, lays out the buckets and binds the memory; that
plan is kept, and the next call like it only runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.algorithms.choose import Choice
from mpistrat.algorithms.cost import DEFAULT, CostModel
from mpistrat.arrays import Array
from mpistrat.communicator.bound_batch import BoundBatch, run_batch
from mpistrat.communicator.call import Call
from mpistrat.communicator.exchange_verbs import ExchangeVerbs
from mpistrat.communicator.explain import Explanation
from mpistrat.communicator.fast_paths import SIGNATURE, FastPaths
from mpistrat.communicator.guard import FRAMES
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.plan_cache import PlanCache
from mpistrat.communicator.validate import apart, check_gather, check_num_packs, check_out, describe, describe_all_reduce
from mpistrat.execution.memory import MemoryReport
from mpistrat.execution.work import Work
from mpistrat.groups.agreement import Signature
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from mpistrat.transports.steps import Steps
from mpistrat.tuning.file import shared_model
from mpistrat.watch.recorder import recorder

if TYPE_CHECKING:
    from mpistrat.communicator.device_plans import MixedPlanCache

__all__ = ["MpiCommunicator", "by_algorithm"]


class MpiCommunicator(ExchangeVerbs):
    """All ranks of a hierarchy. Making one is a collective call.

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
        self._fast = FastPaths(self._executor)
        # one small array in one all-reduce over all ranks is the commonest call: where ranks share cores each line counts
        self._quick = self._fast.known
        self._recorder = recorder()
        self._present, self._window = hierarchy.call, self._executor.intra.window if hierarchy.intra.size > 1 else None
        self.timeline = self._executor.timeline
        self._verbose = self.rank == 0 and settings.VERBOSE.read()
        self._plans: PlanCache | MixedPlanCache = PlanCache(
            self._executor, self._say, shared_model(hierarchy, by_algorithm) if model is None else model
        )
        self._say(f"{self.world}: {', '.join(f'{node.name} has ranks {node.ranks}' for node in self.world.nodes)}")

    @property
    def num_packs(self) -> int | None:
        """How a batch is packed: see `Communicator`; a negative number raises InvalidArgumentError."""
        return self._num_packs

    @num_packs.setter
    def num_packs(self, num_packs: int | None) -> None:
        self._num_packs = check_num_packs(num_packs)
        self._fast.forget()

    @property
    def model(self) -> CostModel:
        """What ``auto`` chooses by."""
        return self._plans.model

    def all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Combine each array across replicas: see `Communicator.all_reduce`. A collective call.

        Raises
        ------
        UnsupportedDtypeError
            If `op` is not defined for a dtype.
        AgreementError
            On every replica, if replicas pass different operations, shapes, dtypes or options; see also `confirm`.
        DeadlineExceededError
            If the options have a deadline and it passes.
        """
        op = op if type(op) is ReduceOp else ReduceOp.parse(op)
        if options is None:
            results = self.all_reduce_again(op, arrays) if out is None else self._again_into(op, arrays, out)
            if results is not None:
                return results
        with self._guard:
            call, steps, results = self._begin(op, arrays, options, out)
            self._guard.run(call, steps)
            self._settle()
            return results

    def all_reduce_again(self, op: ReduceOp, arrays: Sequence[Array], noted: int = 0, frames: int = 2) -> list[Array] | None:
        """Combine arrays like earlier ones, which go at once: see `Communicator.all_reduce_again`. A collective call."""
        guard = self._guard
        if len(arrays) == 1:
            [array] = arrays
            quick = self._quick.get((op._value_, (array.shape, array.dtype)))
        else:
            quick = self._quick.get((op._value_, *map(SIGNATURE, arrays)))
        if quick is None or self.timeline.enabled or guard.refusal or not guard.lock.acquire(False):
            return None
        try:
            self.num_collectives = number = self.num_collectives + 1
            guard.signature = signature = quick.signature
            self._present.word = word = quick.word ^ (guard.noted_before(noted) if guard.noted else noted)
            index = guard.indexes.get(word) or guard.index(word, "all_reduce", signature.text, signature.details)
            slot = self._recorder.enter(guard.communicator, number, index, frames + 1)
            results = quick.run(arrays)
            self._recorder.leave(slot)
            return results
        except BaseException as error:
            self._recorder.fail(slot)
            raise guard.explain(error) from None
        finally:
            guard.lock.release()

    def start_all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        structure: object = None,
    ) -> Work[list[Array]]:
        """Start what `all_reduce` does: see `Communicator.start_all_reduce`. A collective call."""
        op = ReduceOp.parse(op)
        # as they are now: what the program does with its list and with `num_packs` afterwards is none of this call
        given, num_packs = list(arrays), self._num_packs

        def check(wanted: CommunicationOptions) -> None:
            self._plans.check(op, given, wanted)
            if out is not None:
                self._check_out(out, given)

        def arguments(wanted: CommunicationOptions) -> str:
            return describe_all_reduce(op, given, wanted, num_packs)

        self._guard.require_startable()
        if structure is not None:
            self._guard.note(f"start_all_reduce of {structure}")
        call, refused = self._announce("start_all_reduce", arguments, options, check)
        if refused is not None:
            with self._guard:  # the others hear of it when the turn of their call comes
                call.begin()
                self._refuse(call, refused)
        call.is_started = True
        results, sources = self._landing(given, out)
        return self._guard.start(call, self._job(call, op, list(sources), results, num_packs))

    def reduce_scatter(
        self, op: ReduceOp | str, array: Array, axis: int = 0, options: CommunicationOptions | None = None
    ) -> Array:
        """Combine arrays, and take this replica's part: see `Communicator.reduce_scatter`. A collective call."""
        op = ReduceOp.parse(op)

        def check(wanted: CommunicationOptions) -> None:
            check_gather(array, axis, "reduce_scatter")
            self._plans.check(op, [array], wanted)

        with self._guard:
            arguments = lambda _: f"({op.name}, {describe([array])}, axis={axis})"  # noqa: E731 - a name would say no more
            call, refused = self._announce("reduce_scatter", arguments, options, check)
            steps, [total] = self._let_in(call, refused, op, [array], None)
            self._guard.run(call, steps)
            self._settle()
            return self._part(total, axis)

    def confirm(self) -> None:
        """Compare the calls that were not compared when they were made: see `Communicator.confirm`. A collective call."""
        if self._present.is_unconfirmed:
            with self._guard:
                self._present.settle()

    def choose(self, count: int, dtype: np.dtype[Any], options: CommunicationOptions | None = None) -> Choice:
        """Return the plan, and why, for an all-reduce of `count` elements."""
        return self._plans.choose(count, dtype, self._options.merge(options))

    def explain_batch(self, arrays: Sequence[Array], options: CommunicationOptions | None = None) -> Explanation:
        """Return what a sum of arrays like these does: see `Communicator.explain_batch`."""
        wanted = self._options.merge(options)
        self._plans.check(ReduceOp.SUM, arrays, wanted)
        return self._plans.explain(arrays, wanted, self._num_packs)

    def memory_report(self) -> MemoryReport:
        """Return what this rank holds to communicate."""
        self._guard.settle()
        return self._plans.memory()

    def close(self) -> None:
        """Free the scratch memory and the communicators. A collective call.

        Where a collective has failed, here or on a peer, nothing is freed and nobody waited for: others may still use it.
        """
        self._fast.forget()
        self._guard.settle()
        if self._guard.is_broken():
            self._abandon()
            return
        with self._guard:
            self._enter("close", lambda _: "()", None)  # what is freed is freed by all
        self.confirm()
        self._free()

    def _abandon(self) -> None:
        """Leave all as it is, since other ranks may still use it."""

    def _free(self) -> None:
        """Free the scratch memory and the communicators. A collective call."""
        self._plans.clear()
        self._executor.close()
        self.hierarchy.close()

    def _begin(
        self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions | None, out: Sequence[Array] | None
    ) -> tuple[Call, Steps, list[Array]]:
        """Enter an all-reduce; return its steps, and the results as they will be afterwards."""

        def check(wanted: CommunicationOptions) -> None:
            if not self._plans.has(op, arrays, wanted, self._num_packs):
                self._plans.check(op, arrays, wanted)
            if out is not None:
                self._check_out(out, arrays)

        call, refused = self._announce(
            "all_reduce", lambda wanted: describe_all_reduce(op, arrays, wanted, self._num_packs), options, check
        )
        steps, results = self._let_in(call, refused, op, arrays, out)
        return call, steps, results

    def _let_in(
        self,
        call: Call,
        refused: Exception | None,
        op: ReduceOp,
        arrays: Sequence[Array],
        out: Sequence[Array] | None,
    ) -> tuple[Steps, list[Array]]:
        """Meet the other ranks in a call that combines arrays; return its steps, and the results as they will be."""
        call.begin()
        if refused is not None:
            self._refuse(call, refused)
        batch = self._batch(call, op, arrays, self._num_packs)
        if call.verb == "all_reduce" and call.options is self._options:
            self._learn(op, arrays, batch)
        # a call of another verb has arguments that its batch does not know
        self._guard.begin(call, batch.signature(call.verb) if call.verb == "all_reduce" else Signature(call.describe()))
        results, sources = self._landing(arrays, out)
        return self._steps(batch, sources, results), results

    def _learn(self, op: ReduceOp, arrays: Sequence[Array], batch: BoundBatch) -> None:
        """Note the plan of a call with the strategy's own options, for calls like it."""
        self._fast.learn(op, arrays, batch)

    def _batch(self, call: Call, op: ReduceOp, arrays: Sequence[Array], num_packs: int | None) -> BoundBatch:
        """Return the plan of a call, after ranks have compared it if they bind memory for it or it has a deadline."""
        is_new = not self._plans.has(op, arrays, call.options, num_packs)
        if call.ends or self.is_strict or (is_new and self._guard.checks):
            self._guard.agree(call)
        return self._plans.find(op, arrays, call.options, num_packs)

    def _settle(self) -> None:
        """With MPISTRAT_STRICT compare at once what could wait for a later call."""
        if self.is_strict:
            self._present.settle()

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

    def _steps(self, batch: BoundBatch, sources: Sequence[Array], results: Sequence[Array]) -> Steps:
        """Return the steps that combine `sources` into `results`, after a meeting of the node if they begin otherwise."""
        if self._window is not None and not batch.begins_with_meeting:
            yield from self._window.meet()
        yield from run_batch(batch, sources, results)
        if not batch.is_compared:
            self._present.add_unconfirmed(sum(array.nbytes for array in sources))

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
        self._guard.require_sound()
        call.begin()
        batch = self._batch(call, op, arrays, num_packs)
        self._guard.begin(call, batch.signature("start_all_reduce"))
        self._guard.run(call, self._steps(batch, arrays, results))
        self._settle()
        return results

    def _again_into(self, op: ReduceOp, arrays: Sequence[Array], out: Sequence[Array]) -> list[Array] | None:
        """Do what `all_reduce_again` does for one array, which is not to be divided, into memory of the caller."""
        guard = self._guard
        if len(arrays) != 1 or len(out) != 1 or op is ReduceOp.MEAN or self.timeline.enabled or guard.refusal:
            return None
        source, target = arrays[0], out[0]
        quick = self._fast.into(op, source, target)
        if quick is None or not guard.lock.acquire(False):
            return None
        try:
            self.num_collectives = number = self.num_collectives + 1
            guard.signature = signature = quick.signature
            self._present.word = word = quick.word ^ guard.noted_before(0)
            index = guard.indexes.get(word) or guard.index(word, "all_reduce", signature.text, signature.details)
            slot = self._recorder.enter(guard.communicator, number, index, FRAMES)
            quick.combine(source, target)
            self._recorder.leave(slot)
        except BaseException as error:
            self._recorder.fail(slot)
            raise guard.explain(error) from None
        finally:
            guard.lock.release()
        return [target]

    def _say(self, text: str) -> None:
        if self._verbose:
            print(f"mpistrat: {text}", file=sys.stderr, flush=True)


def by_algorithm(hierarchy: Hierarchy, name: str) -> MpiCommunicator:
    """Return a communicator that takes the algorithm of a name. A collective call."""
    return MpiCommunicator(hierarchy, CommunicationOptions(algorithm=name), model=DEFAULT)
