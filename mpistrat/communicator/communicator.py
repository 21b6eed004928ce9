"""Communicator: arrays in, arrays out, over all ranks of an MPI communicator.

The first call with arrays of certain shapes and dtypes chooses the plans, lays out the buckets and binds the memory; that
plan is kept, and the next call like it only runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpistrat import settings
from mpistrat.algorithms.choose import Choice
from mpistrat.algorithms.cost import DEFAULT, CostModel
from mpistrat.arrays import Array
from mpistrat.communicator.call_sequence import CallSequence
from mpistrat.communicator.data_movement import DataMovement
from mpistrat.communicator.explain import Explanation
from mpistrat.communicator.fast_paths import SIGNATURE, KnownBatch
from mpistrat.communicator.gpu_arrays import GpuArrays
from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.communicator.interface import Arrays, BaseCommunicator
from mpistrat.communicator.meeting import hierarchy_over
from mpistrat.communicator.options import CommunicationOptions, shared_defaults
from mpistrat.communicator.plan_cache import PlanCache
from mpistrat.communicator.reductions import Reductions
from mpistrat.communicator.small_batch import OneArray, SmallBatch
from mpistrat.communicator.validate import check_array, check_num_packs, for_each
from mpistrat.device.binding import bound_device
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.execution.executor import Executor
from mpistrat.execution.memory import MemoryReport
from mpistrat.execution.work import Work
from mpistrat.groups.agreement import Agreement
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.logger import logger
from mpistrat.reduction import ReduceOp
from mpistrat.tuning.file import shared_model
from mpistrat.watch.recorder import recorder

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Communicator", "by_algorithm"]


class Communicator(BaseCommunicator):
    """Collectives on NumPy and CuPy arrays over all ranks of an MPI communicator, as fast as their nodes allow.

    Making one is a collective call of these ranks. A context manager, which closes it. Every verb takes an array, or a list of
    arrays, and returns as many; options of a call win over those of the communicator. What is sent, is sent on duplicates of
    `comm`: messages of the program never meet ours.

    Ranks compare their calls. Every verb raises AgreementError on all of them if they make different ones, or pass different
    operations, shapes, dtypes or options that must agree: before a result is handed out, but for what `confirm` compares. With
    a deadline (`timeout_seconds`) a verb raises DeadlineExceededError on every rank that has come, naming those that have not,
    and no collective is made any more.

    Parameters
    ----------
    comm : MPI.Intracomm or Hierarchy
        The ranks: COMM_WORLD, or some of the job's, as ``Split`` returns. Or groups that were made of them before, which belong
        to the communicator from here on.
    options : CommunicationOptions, optional
        Hold for every call that does not say otherwise; the same on all ranks.
    num_packs : int, optional
        Cut the elements of a batch into so many equal packs; 0 reduces each array by itself. None (the default) packs by
        the options' `bytes_per_pack`.
    model : CostModel, optional
        What ``auto`` chooses by, the same on all ranks; by default what MPISTRAT_TUNING says.
    uses_gpu : bool
        Whether arrays on the GPU that this rank computes on, where it has one, are combined there.

    Attributes
    ----------
    world : World
        The topology: which rank is on which node.
    rank, size, timeline : int, int, Timeline
        This rank, and the number of ranks; what records the phases of each collective while it is enabled.

    Raises
    ------
    InvalidArgumentError
        If `comm` is not an intracommunicator of this rank, or `num_packs` is negative.
    AgreementError, DeadlineExceededError
        If ranks pass different options or have other settings, or do not all make this call before the deadline of `options`.
    LaunchError, TopologyError, TransportError
        If the ranks or their GPUs do not go together, or the settings name a transport that does not serve on one node.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | Hierarchy,
        options: CommunicationOptions | None = None,
        *,
        num_packs: int | None = None,
        model: CostModel | None = None,
        uses_gpu: bool = True,
    ) -> None:
        if isinstance(comm, Hierarchy):
            check_num_packs(num_packs)
        self.hierarchy = comm if isinstance(comm, Hierarchy) else hierarchy_over(comm, options, num_packs)
        self.world, self.rank, self.size = self.hierarchy.world, self.hierarchy.rank, self.hierarchy.world.size
        agreement = Agreement(self.hierarchy.world_group)
        self._options = shared_defaults(agreement).merge(options)
        self._executor = Executor(self.hierarchy)
        self.timeline = self._executor.timeline
        self._guard = CollectiveGuard(self.hierarchy, agreement, self._executor.intra.window, self._options, self)
        self._recorder, self._present = recorder(), self.hierarchy.call
        self._verbose = self.rank == 0 and settings.VERBOSE.read()
        self._say(f"{self.world}: {', '.join(f'{node.name} has ranks {node.ranks}' for node in self.world.nodes)}")
        plans = PlanCache(self._executor, self._say, shared_model(self.hierarchy, by_algorithm) if model is None else model)
        device = bound_device() if uses_gpu else None
        self._gpu = None if device is None else GpuArrays(device, self._executor, plans, self._guard, self._say)
        self._calls = CallSequence(self._guard, self._options)
        self._movement = DataMovement(self._executor, self._guard, self._calls, self._gpu)
        self._reductions = Reductions(self._executor, self._guard, self._calls, plans, self._gpu)
        self._reductions.num_packs = num_packs
        self._plans, self._fast = self._reductions.plans, self._reductions.fast
        # one small array in one all-reduce over all ranks is the commonest call: where ranks share cores each line counts
        self._quick = self._fast.known

    @property
    def num_collectives(self) -> int:
        """Collective calls made so far: the sequence number of the last one."""
        return self._guard.number

    @property
    def num_packs(self) -> int | None:
        """How a batch is packed, None or a number; to be set on all ranks alike, a negative one raises InvalidArgumentError."""
        return self._reductions.num_packs

    @num_packs.setter
    def num_packs(self, num_packs: int | None) -> None:
        self._reductions.num_packs = check_num_packs(num_packs)
        self._fast.forget()

    @property
    def is_strict(self) -> bool:
        """Whether everything is compared before a result is handed out, also what `note` and `confirm` leave for later."""
        return self._calls.is_strict

    @is_strict.setter
    def is_strict(self, is_strict: bool) -> None:
        self._calls.is_strict = is_strict
        self._fast.forget()

    @property
    def model(self) -> CostModel:
        """What ``auto`` chooses by."""
        return self._plans.model

    @property
    def path(self) -> str:
        """Which transports arrays on GPUs take, and why not faster ones; empty where ranks compute on CPUs."""
        return "" if self._gpu is None else self._gpu.path

    def all_reduce(
        self, op: ReduceOp | str, arrays: Arrays, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
        """Combine each array across ranks. A collective call.

        Results on the GPU are there when the caller's current stream gets to what is put on it next.

        Parameters
        ----------
        op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD, in any case; MEAN is SUM and one division by the number of ranks.
        arrays : ndarray or list of ndarray
            Of NumPy or CuPy, of any shapes and of the dtypes that `ReduceOp` accepts, contiguous or not; the same on all ranks.
            Those of a list are reduced together.
        options : CommunicationOptions, optional
            Win over those of the communicator.
        out : ndarray or list of ndarray, optional
            C-contiguous arrays of equal shapes and dtypes to write to; they may be `arrays` themselves.

        Returns
        -------
        ndarray or list of ndarray
            `out`, or new arrays; never those that came in.

        Raises
        ------
        UnsupportedDtypeError
            If `op` is not defined for a dtype.
        InvalidArgumentError
            If the operation is unknown, `out` does not fit, or the options cannot be used.
        """
        op = op if type(op) is ReduceOp else self._parsed(op, "all_reduce", options)
        given: Any = arrays
        landing: Any = out
        is_one = not isinstance(given, (list, tuple))
        if is_one:
            given, landing = [given], None if out is None else [out]
        results = self.all_reduce_again(op, given, 0, 2, landing) if options is None else None
        if results is None:
            self._admit("all_reduce", given, options)
            results = self._reductions.all_reduce(op, given, options, landing)
        return results[0] if is_one else results

    def all_reduce_again(
        self, op: ReduceOp, arrays: Sequence[Array], noted: int = 0, frames: int = 2, out: Sequence[Array] | None = None
    ) -> list[Array] | None:
        """Combine arrays like earlier ones, by their fast path: see `BaseCommunicator.all_reduce_again`. A collective call."""
        guard = self._guard
        quick: OneArray | SmallBatch | KnownBatch | None
        into = None
        try:
            if out is not None:
                quick = self._fast.into(op, arrays, out)
                into = quick if isinstance(quick, OneArray) else None
            elif len(arrays) == 1:
                [array] = arrays
                quick = self._quick.get((op._value_, (array.shape, array.dtype, type(array))))
            else:
                quick = self._quick.get((op._value_, *map(SIGNATURE, arrays)))
        except AttributeError:  # something is not an array: the way past this one refuses it
            return None
        if quick is None or self.timeline.enabled or guard.refusal or not guard.lock.acquire(False):
            return None
        try:
            guard.number = number = guard.number + 1
            guard.signature = call = quick.signature
            self._present.word = word = quick.word ^ (guard.noted_before(noted) if guard.noted else noted)
            index = guard.indexes.get(word) or guard.index(word, "all_reduce", call.text_after(word ^ call.word), call.details)
            slot = self._recorder.enter(guard.communicator, number, index, frames + 1)
            results = quick.run(arrays) if into is None or out is None else [into.combine(arrays[0], out[0])]
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
        arrays: Arrays,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
        structure: object = None,
    ) -> Work[Any]:
        """Start what `all_reduce` does, and return a handle whose ``wait()`` returns what that would. A collective call.

        What was started goes on while the program computes, one after the other in the order of the calls; any other
        collective begins when all that was started before has ended. Until then `arrays` and `out` must be left alone. A
        deadline counts from when the turn of the operation comes. What is refused by one rank alone is raised here; all
        that is found out together with the others, such as that calls differ, is raised by the handle. On a GPU it begins after
        what the caller's current stream has been given so far; when it has ended, its results are there for every stream.

        Parameters
        ----------
        op, arrays, options, out : as for `all_reduce`, which says what is raised too
        structure : object, optional
            Of the value whose leaves the arrays are: its text must be the same on all ranks.
        """
        given: Any = arrays
        landing: Any = out
        self._admit("start_all_reduce", given, options)
        op = self._parsed(op, "start_all_reduce", options)
        if isinstance(given, (list, tuple)):
            return self._reductions.start_all_reduce(op, given, options, landing, structure)
        work = self._reductions.start_all_reduce(op, [given], options, None if out is None else [landing], structure)
        return work.then(lambda results: results[0])

    def reduce_scatter(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
    ) -> Any:
        """Combine each array across ranks; each rank gets its part along `axis`. A collective call.

        Parts are in rank order, as equal as can be, the first ones longer by one.

        Parameters
        ----------
        op, arrays, options : ReduceOp or str, ndarray or list of ndarray, CommunicationOptions
            As for `all_reduce`, but that arrays have an axis at least, and those of a list are reduced one after the other.
        axis : int
            Where to divide.
        out : ndarray or list of ndarray, optional
            C-contiguous arrays of the shapes and dtypes of the parts to write to.
        """
        op = self._parsed(op, "reduce_scatter", options)

        def one(array: Array, target: Array | None) -> Array:
            return self._reductions.reduce_scatter(op, array, axis, options, target)

        return self._each("reduce_scatter", one, arrays, out, options)

    def all_gather(
        self, arrays: Arrays, axis: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
        """Concatenate the arrays of all ranks along `axis`, in rank order. A collective call.

        Parameters
        ----------
        arrays : ndarray or list of ndarray
            Extents along `axis` may differ between ranks; all others, and the dtype, must agree. Those of a list are gathered
            one after the other.
        axis, options : int, CommunicationOptions
            Where to concatenate, and how.
        out : ndarray or list of ndarray, optional
            C-contiguous arrays of the shapes and dtypes of the results to write to, on all ranks or on none.

        Raises
        ------
        InvalidArgumentError
            If an array has no axes, `axis` is out of range, or shapes, dtypes or `out` do not fit: on every rank.
        """
        return self._each(
            "all_gather", lambda array, target: self._movement.all_gather(array, axis, options, target), arrays, out, options
        )

    def gather(self, arrays: Array | list[Array], root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the arrays of all ranks, in rank order, on rank `root`; None elsewhere. A collective call.

        Parameters
        ----------
        arrays : ndarray or list of ndarray
            Of one shape and dtype on all ranks. Of a list, a list of what is returned for each.
        root, options : int, CommunicationOptions
            Who gets them, and how.
        """
        return self._each("gather", lambda array, _: self._movement.gather(array, root, options), arrays, None, options)

    def all_to_all(self, arrays: Arrays, options: CommunicationOptions | None = None) -> Any:
        """Send array i to rank i; return what came from each rank, in rank order. A collective call.

        Parameters
        ----------
        arrays : list of ndarray or ndarray
            One for each rank, of one dtype and equal extents but for the first axis. Or one array, of which rank i gets the
            part i along the first axis, as `reduce_scatter` divides it; what comes is joined along it.

        Raises
        ------
        InvalidArgumentError
            If there is not one array for each rank, or they do not fit.
        """
        self._admit("all_to_all", arrays, options)
        with self._reductions.active():
            if isinstance(arrays, (list, tuple)):
                return self._movement.all_to_all(arrays, options)
            return self._movement.all_to_all_parts(arrays, options)

    def broadcast(
        self, arrays: Arrays, root: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
        """Return the array of rank `root`, whose shape and dtype count. A collective call.

        Parameters
        ----------
        arrays : ndarray or list of ndarray
            That of `root` is sent; that of another rank only says whether the result is to be on the GPU. Those of a list are
            sent one after the other.
        root, options : int, CommunicationOptions
            Whose array it is, and how to send it.
        out : ndarray or list of ndarray, optional
            C-contiguous arrays of the shape and dtype of what is sent to write to; they may be `arrays` themselves.

        Raises
        ------
        InvalidArgumentError
            If `root` is not a rank, or `out` does not fit on one of them: on every rank.
        """
        return self._each(
            "broadcast", lambda array, target: self._movement.broadcast(array, root, options, target), arrays, out, options
        )

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all ranks have come here. A collective call."""
        self._require_open()
        self._movement.barrier(options)

    def agree(self, call: str, error: Exception | None = None, options: CommunicationOptions | None = None) -> None:
        """Check at once that all ranks pass the same text: see `BaseCommunicator.agree`. A collective call."""
        self._require_open()
        with self._guard:
            self._guard.agree(self._calls.announce_text(call, options), error)

    def note(self, text: str, options: CommunicationOptions | None = None) -> None:
        """Have a text compared with the next collective: see `BaseCommunicator.note`."""
        if self._calls.is_strict:
            self.agree(text, None, options)
        else:
            self._guard.note(text)

    def refuse(self, call: str, error: Exception, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise `error`, and let the other ranks know: see `BaseCommunicator.refuse`."""
        self._require_open()
        with self._guard:
            self._calls.refuse(self._calls.announce_text(call, options), error)

    def confirm(self) -> None:
        """Compare the calls that were not compared when they were made: see `BaseCommunicator.confirm`. A collective call."""
        if self._present.is_unconfirmed:
            with self._guard:
                self._present.settle()

    def choose(self, count: int, dtype: np.dtype[Any], options: CommunicationOptions | None = None) -> Choice:
        """Return the plan, and why, for an all-reduce of `count` elements: a sum. Sends nothing."""
        self._require_open()
        return self._plans.choose(count, dtype, self._options.merge(options))

    def explain(self, arrays: Array | Sequence[Array], options: CommunicationOptions | None = None) -> Explanation:
        """Return what an all-reduce of arrays like these, a sum or a mean, does, and what it took last. Sends nothing.

        Raises
        ------
        UnsupportedDtypeError, TransportError, InvalidArgumentError
            As `all_reduce` would, where the arrays cannot be combined as the options say.
        """
        self._require_open()
        given: Any = arrays if isinstance(arrays, (list, tuple)) else [arrays]
        wanted = self._options.merge(options)
        self._plans.check(ReduceOp.SUM, given, wanted)
        return self._plans.explain(given, wanted, self.num_packs)

    def memory_report(self) -> MemoryReport:
        """Return what this rank holds to communicate: windows, scratch memory and plans, in bytes."""
        self._require_open()
        self._guard.settle()
        return self._plans.memory()

    def close(self, owner: str = "") -> None:
        """Free the scratch memory and the duplicated communicators; closing again does nothing. A collective call.

        Where a collective has failed, here or on a peer, nothing is freed and nobody waited for: others may still use it.
        The `owner` is the strategy that is closed, for the error of later calls; by default it is the communicator.
        """
        if self.is_closed:
            return
        self._fast.forget()
        self._guard.settle()
        if self._guard.is_broken():
            if self._gpu is not None:
                self._gpu.abandon()
        else:
            with self._guard:
                self._calls.enter("close", lambda _: "()", None)  # what is freed is freed by all
            self.confirm()
            if self._gpu is not None:
                self._gpu.close()
            self._plans.clear()
            self._executor.close()
            self.hierarchy.close()
        super().close(owner)

    def _require_open(self) -> None:
        if self.is_closed:
            self._guard.require_sound()  # a collective that failed before says more
        super()._require_open()

    def _admit(self, verb: str, arrays: Any, options: CommunicationOptions | None) -> None:
        """Raise where this rank can make no such call: a communicator that was closed, or what is not an array."""
        self._require_open()
        try:
            for array in arrays if isinstance(arrays, (list, tuple)) else [arrays]:
                check_array(array)
        except UnsupportedDtypeError as error:
            self.refuse(verb, error, options)

    def _parsed(self, op: ReduceOp | str, verb: str, options: CommunicationOptions | None) -> ReduceOp:
        try:
            return ReduceOp.parse(op)
        except (TypeError, InvalidArgumentError) as error:
            self.refuse(verb, error, options)

    def _each(
        self,
        verb: str,
        act: Callable[[Array, Array | None], Any],
        arrays: Array | Sequence[Array],
        out: Any,
        options: CommunicationOptions | None,
    ) -> Any:
        """Return what a verb makes of one array, or of each of a list, of which all ranks must have as many."""
        self._admit(verb, arrays, options)
        if isinstance(arrays, (list, tuple)):
            if out is not None and len(out) != len(arrays):
                self.refuse(verb, InvalidArgumentError(f"out must hold {len(arrays)} arrays, one for each; got {len(out)}"))
            self.note(f"{verb} of {len(arrays)} arrays", options)
        with self._reductions.active():
            return for_each(act, arrays, out)

    def _say(self, text: str) -> None:
        if self._verbose:
            logger.info(text)


def by_algorithm(hierarchy: Hierarchy, name: str) -> Communicator:
    """Return a communicator for host memory that takes the algorithm of a name. A collective call."""
    return Communicator(hierarchy, CommunicationOptions(algorithm=name), model=DEFAULT, uses_gpu=False)
