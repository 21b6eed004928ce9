"""Communicator: collectives on arrays over all ranks of an MPI communicator.

The first call with given shapes and dtypes chooses the plans, lays out the buckets and binds the memory. Later calls with the
same shapes and dtypes reuse them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from mpistrat import settings
from mpistrat.algorithms.planners import Measured
from mpistrat.arrays import Array, as_operand, check_capture, is_on_device, like, to_device
from mpistrat.communicator.data_movement import DataMovement
from mpistrat.communicator.explain import Explanation, MemoryReport
from mpistrat.communicator.gpu_arrays import GpuArrays, has_arrays
from mpistrat.communicator.interface import Arrays, BaseCommunicator, as_lists
from mpistrat.communicator.options import DEFAULTS, CommunicationOptions, check_options, rendezvous_seconds, shared_defaults
from mpistrat.communicator.passing import Passing
from mpistrat.communicator.planning import Planner, Reduction
from mpistrat.communicator.programs import Known
from mpistrat.communicator.reductions import Reductions
from mpistrat.communicator.validate import alike, check_comm, read_arrays
from mpistrat.device.binding import bound_device
from mpistrat.errors import DeadlineExceededError, InvalidArgumentError, MpistratError, UnavailableError, UnsupportedDtypeError
from mpistrat.execution.engine import Work
from mpistrat.execution.executor import Executor
from mpistrat.execution.guard import Guard, compare_at_end, forget
from mpistrat.groups.agreement import Agreement
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.launch import bootstrap
from mpistrat.logger import logger
from mpistrat.reduction import ReduceOp
from mpistrat.structures import each_leaf
from mpistrat.tuning import shared_measurements
from mpistrat.watch.recorder import recorder, watched, write_entry

if TYPE_CHECKING:
    from mpi4py import MPI

_frame_at = sys._getframe
_MOST_PASSED_BYTES = 1 << 14  # MPI is faster up to here, on one node too: see docs/benchmarks/index.md


class Communicator(BaseCommunicator):
    """Hierarchical collectives on NumPy and CuPy arrays over all ranks of an MPI communicator.

    Making one is a collective call of these ranks. As a context manager it closes itself. Every verb takes an array or a list
    of arrays and returns the same; tensors of PyTorch, arrays of JAX and others, and numbers, are taken as by a strategy, and
    masked arrays refused. The options of a call override those of the communicator. All messages are sent on duplicates of
    `comm`, so they never match messages of the program.

    Ranks compare their calls. If they make different calls, or pass different operations, shapes, dtypes or options that must
    agree, every verb raises AgreementError on all ranks before it returns a result, except for calls that `confirm` compares
    later. With a deadline (`timeout_seconds`), a verb raises DeadlineExceededError on every rank that has arrived and names
    those that have not; the communicator is unusable afterwards.

    Parameters
    ----------
    comm : MPI.Intracomm or Hierarchy
        COMM_WORLD, or a communicator of some of the job's ranks, as ``Split`` returns. Or a hierarchy of groups over them,
        which the communicator then owns.
    options : CommunicationOptions, optional
        Defaults for every call; the same on all ranks.
    measured : Measured, optional
        What algorithm ``auto`` goes by, the same on all ranks; by default the file that MPISTRAT_TUNING selects.
    uses_gpu : bool
        Whether arrays on this rank's GPU, if it has one, are combined there.

    Attributes
    ----------
    world : World
        The topology: which rank is on which node.
    rank, size, timeline : int, int, Timeline
        This rank; the number of ranks; a recorder of the phases of each collective, while it is enabled.

    Raises
    ------
    InvalidArgumentError
        If `comm` is not an intracommunicator of this rank.
    AgreementError, DeadlineExceededError
        If ranks pass different arguments or have different settings, or do not all make this call before the deadline of
        `options`.
    LaunchError, TopologyError, TransportError
        If the ranks or their GPUs cannot form one job, or the settings name a transport that a node does not support.
    """

    _movement: DataMovement

    def __init__(
        self,
        comm: MPI.Intracomm | Hierarchy,
        options: CommunicationOptions | None = None,
        *,
        measured: Measured | None = None,
        uses_gpu: bool = True,
    ) -> None:
        self.hierarchy = comm if isinstance(comm, Hierarchy) else build_hierarchy(comm, options, measured)
        self._owned = ExitStack()
        self._owned.callback(self.hierarchy.close)
        try:
            with watched("Communicator: its plans and memory", self.hierarchy.members):
                self._build(options, measured, uses_gpu)
        except (DeadlineExceededError, UnavailableError):  # a rank is missing
            raise
        except MpistratError:  # raised on all ranks, which free together what they made
            self._owned.close()
            raise

    def _build(self, options: CommunicationOptions | None, measured: Measured | None, uses_gpu: bool) -> None:
        self.world, self.rank, self.size = self.hierarchy.world, self.hierarchy.rank, self.hierarchy.world.size
        agreement = Agreement(self.hierarchy.world_group)
        self._options = shared_defaults(agreement, self.hierarchy.settings).merge(options)
        self._executor = Executor(self.hierarchy)
        agreement.rows = self._executor.world.rows
        self._owned.callback(self._executor.close)
        self.timeline = self._executor.timeline
        self._guard = Guard(self.hierarchy, agreement, self._executor.intra.window, self._options, self)
        compare_at_end(self._guard)
        self._owned.callback(forget, self._guard)
        self._recorder, self._present, self._own = recorder(), self.hierarchy.call, self._guard.thread.own
        # for `run_known`; a forked child gets others, but makes no calls
        self._entry = self._recorder.slots.__next__, self._recorder.places, self._recorder.memory, self._recorder.words
        self._verbose = self.rank == 0 and self.hierarchy.settings[settings.VERBOSE]
        self._say(f"{self.world}: {', '.join(f'{node.name} has ranks {node.ranks}' for node in self.world.nodes)}")
        measured = shared_measurements(self.hierarchy) if measured is None else measured
        device = bound_device() if uses_gpu else None
        self._gpu = None if device is None else GpuArrays(device, self._executor, self._guard)
        if self._gpu is not None:
            self._owned.callback(self._gpu.executor.close)
        planner = Planner(self._executor, self._say, measured)
        self._reductions = Reductions(self._executor, self._guard, planner, self._gpu, self._say)
        self._programs, self._active = self._reductions.programs, self._reductions.active
        self._movement = DataMovement(self._executor, self._guard, self._gpu, self._programs)
        self._known = None if self._gpu is None else self._known_by_nccl

    @property
    def num_collectives(self) -> int:
        """Collective calls made so far: the sequence number of the last one."""
        return self._guard.number

    @property
    def is_strict(self) -> bool:
        """Whether every call is compared before it returns, including what `note` and `confirm` would compare later."""
        return self._present.is_strict

    @is_strict.setter
    def is_strict(self, is_strict: bool) -> None:
        self._guard.wait_for_started()  # which all ranks are to make in one way
        self._present.is_strict = is_strict
        self._programs.forget_calls()

    @property
    def path(self) -> str:
        """The transports used for arrays on GPUs, and why not faster ones; empty where ranks compute on CPUs."""
        return "" if self._gpu is None else str(self._gpu.executor.transports)

    def all_reduce(
        self, op: ReduceOp | str, arrays: Arrays, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
        """Combine each array across ranks. A collective call.

        Results on the GPU are ordered on the caller's current stream: work enqueued there afterwards sees them.

        Parameters
        ----------
        op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD, in upper or lower case; MEAN is SUM and one division by the number of ranks.
        arrays : ndarray or list of ndarray
            Arrays of any shapes and of dtypes that `ReduceOp` accepts, contiguous or not; shapes and dtypes are the same on all
            ranks. The arrays of a list are reduced together, and lie in one memory.
        options : CommunicationOptions, optional
            Override those of the communicator.
        out : ndarray or list of ndarray, optional
            C-contiguous arrays of the same shapes and dtypes for the results, that share no memory; they may be `arrays`
            themselves.

        Returns
        -------
        ndarray or list of ndarray
            `out`, or new arrays; never views of `arrays`. Small ones of a list on a GPU share allocations of up to 1 MiB, which
            are freed with the last array in them: copy what is to be kept for long.

        Raises
        ------
        UnsupportedDtypeError
            If `op` is not defined for a dtype, or a value cannot be read as an array.
        InvalidArgumentError
            If an array is in the memory of another device, the operation is unknown, `out` has other shapes or dtypes, or the
            options cannot be used.
        """
        op = op if type(op) is ReduceOp else self._parsed(op, "all_reduce", options)
        given: Any = arrays
        targets: Any = out
        if is_one := type(given) is np.ndarray or not isinstance(given, (list, tuple)):
            given, targets = [given], None if out is None else [out]
        # an array in the place of a list has rows, which might fit
        is_known = is_one or out is None or isinstance(out, (list, tuple))
        known = self._programs.known(op._value_, given, options, targets) if is_known else None
        results = None if known is None else self.run_known(known, given, targets)
        if results is None:
            sources, memory = self._read("all_reduce", given, targets, options)
            if self._gpu is not None and self._gpu.may_capture and has_arrays(sources) and self._gpu.is_capturing():
                results = self._reductions.capture(self._gpu, op, sources, options, memory)
            else:
                results = self.try_fast_all_reduce(op, sources, options, memory)  # of what was a number or a tensor, say
            if results is None:
                results = self._reductions.reduce("all_reduce", op, sources, options, memory)
            results = alike(results, given, targets)
        return results[0] if is_one else results

    def try_fast_all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        noted: int = 0,
        frames: int = 2,
    ) -> list[Array] | None:
        """Combine arrays like earlier ones, if there were any: see `BaseCommunicator`. A collective call."""
        known = self._programs.known(op._value_, arrays, options, out)
        return None if known is None else self.run_known(known, arrays, out, noted, frames + 1)

    def run_known(
        self, known: Known, arrays: Sequence[Array], out: Sequence[Array] | None, noted: int = 0, frames: int = 2
    ) -> list[Array] | None:
        """Combine arrays as in a known call, if the next one may be made so: see `try_fast_all_reduce`. A collective call."""
        guard = self._guard
        if self._gpu is not None and not self._gpu.admits(arrays, out):
            return None
        if self.timeline.enabled or (guard.refusal and not guard.is_clear()):
            return None
        free = self._own.free
        try:
            free.pop()  # as `CallingThread.lock`, which would cost a call
        except IndexError:
            return None
        slot = 0
        try:
            guard.number = number = guard.number + 1
            guard.signature = call = known.signature
            self._present.digest = key = known.digest ^ (guard.take_noted_digest(noted) if guard.noted else noted)
            index = guard.indexes.get(key) or guard.index(key, call.text_after(key ^ call.digest), call.nbytes)
            next_slot, places, memory, words = self._entry
            try:
                frame = _frame_at(frames)
            except ValueError:  # the call itself is an exit handler, with no frame of Python beneath
                frame = _frame_at()
            line = places.get((id(frame.f_code), frame.f_lasti)) or self._recorder.find_line(frame)
            start, slot = next_slot()
            write_entry(memory, start, number, guard.communicator, index, line, monotonic_ns())
            if self._present.unconfirmed:
                self._present.count()
            results = known.run(arrays, out)
            words[slot] = monotonic_ns()
            return results
        except BaseException as error:
            if slot:
                self._recorder.fail(slot)
            raise guard.fail_current(error) from None
        finally:
            free.append(None)

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all ranks have entered the barrier. A collective call."""
        known = self._programs.known("barrier", (), options, None)
        if known is None or self.run_known(known, (), None) is None:
            super().barrier(options)

    def pass_small_arrays(self) -> Passing:
        """Hand arrays of up to 16 KiB to MPI as they are, and compare their calls later, unless calls must be compared first.

        All ranks make this call, before any other. Return what makes such calls with little Python.
        """
        if not (self.is_strict or self._options != DEFAULTS):
            self._executor.world.most_passed_bytes = _MOST_PASSED_BYTES
        return Passing(self._programs, self._executor, self._guard)

    def start_all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
        structure: object = None,
    ) -> Work[Any]:
        """Start an asynchronous `all_reduce`; ``wait()`` of the returned handle returns its result. A collective call.

        Started operations run in the background, one after the other in the order of the calls; any other collective waits
        until they have completed. Until an operation has completed, the program must not write to `arrays` or use `out`. Its
        deadline counts from when it begins. An argument that this rank refuses raises here; errors that ranks find together,
        such as that their calls differ, are raised by the handle. On a GPU the operation begins after the work enqueued so far
        on the caller's current stream; once it has completed, every stream may read the results.

        On a GPU where NCCL joins all ranks, no thread is needed: as in `all_reduce` ranks meet and compare their calls here,
        which raises what they find, and the work is enqueued on another stream. ``wait()`` lets the caller's current stream
        wait for it, ``wait(host=True)`` the program.

        Parameters
        ----------
        op, arrays, options, out : as for `all_reduce`, which lists the errors too
        structure : object, optional
            Structure of the nested value whose leaves are `arrays`: its text must be the same on all ranks.
        """
        op = self._parsed(op, "start_all_reduce", options)
        is_list, given, targets = type(arrays) is list, cast("Any", arrays), cast("Any", out)
        if structure is None and (out is None or (type(out) is list) == is_list) and not self._guard.noted:
            if not is_list:
                given, targets = [given], None if out is None else [out]
            known = self._programs.known(("start", op._value_), given, options, targets)
            # to confirm calls here would wait for the other ranks
            handles: Any = None if known is None or self._present.unconfirmed else self.run_known(known, given, targets)
            if handles is not None:
                work: Work[Any] = handles[0]
                return work if is_list else work.then(operator.itemgetter(0))

        def start(sources: list[Array], memory: list[Array] | None) -> Work[list[Array]]:
            return self._reductions.start_all_reduce(op, sources, options, memory)

        call = partial(self.all_reduce, op, options=options)
        return self._start("start_all_reduce", call, arrays, out, options, start, structure)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Let `all_reduce` be a part of CUDA graphs that are captured in this block. Entering it is a collective call.

        Capture on CuPy's current stream, and begin within the block. `all_reduce` needs `out` there, which may be the arrays;
        NCCL sums these as they are, all of a dtype together, whatever `algorithm`, `bytes_per_pack` and `num_packs` say. Keep
        them as long as the graph, and delete the graph before the communicator is closed. Ranks compare the calls when
        these are captured. Replays are not compared and have no deadline: all ranks must launch their graphs in the same order,
        also among other collectives.

        Raises
        ------
        UnavailableError
            If NCCL does not join the GPUs of all ranks: `path` says why.
        """
        self._require_open()
        with self._active(), self._guard:
            call, _ = self._guard.begin("capture", None, lambda _: "()", lambda _: self._reductions.check_capture(self._gpu))
            self._guard.agree(call)
            assert self._gpu is not None, "was checked"
            self._guard.run(call, self._reductions.prepare_capture(self._gpu))
        before, self._gpu.may_capture = self._gpu.may_capture, True
        try:
            yield
        finally:
            self._gpu.may_capture = before

    def _start(
        self,
        verb: str,
        call: Callable[..., Any],
        arrays: Arrays,
        out: Arrays | None,
        options: CommunicationOptions | None,
        start: Callable[[list[Array], list[Array] | None], Work[Any]] | None = None,
        structure: object = None,
    ) -> Work[Any]:
        """Start a call: enqueue it where NCCL joins the GPUs of all ranks, else `start` it, or make it here."""
        given, targets, is_one = as_lists(arrays, out)
        sources, memory = self._read(verb, given, targets, options)
        given, targets, gpu = list(given), targets and list(targets), self._gpu  # the program may change its lists
        if structure is not None:
            with self._guard.starting():  # which may refuse
                self._guard.note(f"{verb} of {structure}")

        def finish(results: list[Array]) -> Any:
            found = alike(results, given, targets)
            return found[0] if is_one else found

        if gpu is not None and gpu.executor.enqueues and has_arrays(sources):
            return gpu.enqueue(call, sources, memory).then(finish)
        return (Work.ended(call(sources, out=memory)) if start is None else start(sources, memory)).then(finish)

    def _reduce_scatter(
        self, op: ReduceOp | str, array: Array, axis: int, options: CommunicationOptions | None, out: Array | None
    ) -> Array:
        op = self._parsed(op, "reduce_scatter", options)
        # what only equals a known axis is looked at: True, or 1.0, which is refused
        known = self._programs.known((op._value_, axis), [array], options, None) if type(axis) is int else None
        if known is not None and (out is None or self._reductions.fits_part(out, array, axis)):
            results = self.run_known(known, [array], None if out is None else [out], frames=4)
            if results is not None:
                return results[0]
        if axis is None:  # which would be that of an all_reduce
            self.refuse("reduce_scatter", TypeError("axis must be an int; got None"), options)
        with suppress(Exception):  # which the check of the call raises
            axis = operator.index(axis)  # True and 1 are one axis, which calls are known by
        return self._reductions.reduce("reduce_scatter", op, [array], options, None if out is None else [out], axis)[0]

    def _known_by_nccl(self, verb: str, number: object, op: Any, array: Any, options: Any, out: Any) -> Any:
        """Make a call of a verb on one array like an earlier one by NCCL; if there was none, do nothing and return None."""
        if type(number) is not int or self.timeline.enabled:  # what only equals a known axis is looked at: True, or 1.0
            return None
        kind = (verb, number, out is None) if op is None else (self._parsed(op, verb, options)._value_, number)
        known, targets = self._programs.known(kind, [array], options, None), None if out is None else [out]
        if known is None or not known.gives(out, array):
            return None
        if op is not None:
            results = self.run_known(known, [array], targets, frames=4)
        else:
            results = self._movement.make_known(known, [array], targets)
        return results[0] if results else None

    def agree(self, call: str, error: Exception | None = None, options: CommunicationOptions | None = None) -> None:
        """Check at once that all ranks pass the same text: see `BaseCommunicator.agree`. A collective call."""
        self._require_open()
        with self._guard:
            self._guard.agree(self._guard.begin_text(call, options), error)

    def note(self, text: str, options: CommunicationOptions | None = None) -> None:
        """Compare a text along with the next collective: see `BaseCommunicator.note`."""
        if self.is_strict:
            self.agree(text, None, options)
        else:
            self._guard.note(text)

    def refuse(self, call: str, error: Exception, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise `error`, and raise on the other ranks: see `BaseCommunicator.refuse`."""
        self._require_open()
        with self._guard:
            self._guard.refuse(self._guard.begin_text(call, options), error)

    def confirm(self) -> None:
        """Compare the calls that were not compared when they were made: see `BaseCommunicator.confirm`. A collective call."""
        self._guard.confirm()

    def explain(self, arrays: Array | Sequence[Array], options: CommunicationOptions | None = None) -> Explanation:
        """Return how a sum or mean of such arrays is computed. Sends nothing.

        Raises
        ------
        UnsupportedDtypeError, TransportError, InvalidArgumentError
            As `all_reduce`, where the arrays cannot be combined with these options.
        """
        self._require_open()
        given, _ = read_arrays(as_lists(arrays, None)[0])
        asked = Reduction(ReduceOp.SUM, given, self._options.merge(options))
        self._programs.check(asked)
        return self._programs.explain(asked)

    def memory_report(self) -> MemoryReport:
        """Return the memory this rank holds for communication, in bytes: windows, scratch memory and plans."""
        self._require_open()
        self._guard.wait_for_started()
        return self._programs.memory()

    def close(self, owner: str = "") -> None:
        """Free the scratch memory and the duplicated communicators; closing again does nothing. A collective call.

        After a collective has failed, here or on a peer, nothing is freed and no rank is waited for: peers may still use it.
        `owner` is the strategy that is closed, for the error of later calls; by default it is the communicator.
        """
        if self.is_closed:
            return
        self._programs.forget_calls()
        self._guard.wait_for_started()
        while not self._guard.is_broken():
            with self._guard, self._guard.forgiving():
                call, _ = self._guard.begin("close", None, lambda _: "()")
                self._guard.agree(call)  # all ranks free the memory together
                break
        if self._guard.is_broken():
            if self._gpu is not None:
                self._gpu.executor.abort("a collective has failed")
        else:
            self.confirm()
            with watched("Communicator: close", self.hierarchy.members):
                self._programs.clear()
                self._owned.close()
        super().close(owner)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} belongs to this process, and so does what is of its strategy: it can be neither copied nor pickled.\n"
            "    incorrect:  pickle.dumps(variable); pool.map(function, [strategy])\n"
            "    correct:    pickle.dumps(variable.numpy()), or mpistrat.Checkpoint; a strategy for each process"
        )

    def _read(
        self, verb: str, values: Sequence[Any], out: Any, options: CommunicationOptions | None
    ) -> tuple[list[Array], list[Array] | None]:
        sources, targets = super()._read(verb, values, out, options)
        if self._gpu is None or not has_arrays(sources):
            return sources, targets
        with self.refusing(verb, options):
            check_capture(self._gpu.device, "arrays")
        if self._gpu.is_capturing() and not (verb == "all_reduce" and self._gpu.may_capture):
            why = "a CUDA graph is being captured on this stream: only all_reduce can be a part of it, in Communicator.capture"
            self.refuse(verb, InvalidArgumentError(f"{why}. Call {verb} before the capture or after it"), options)
        if targets is None:  # numbers go with the arrays
            sources = [source if source.ndim or is_on_device(source) else to_device(source) for source in sources]
        return sources, targets

    def _require_open(self) -> None:
        if self.is_closed:
            self._guard.raise_if_failed()  # the error of a failed collective is more helpful
        super()._require_open()

    def _parsed(self, op: ReduceOp | str, verb: str, options: CommunicationOptions | None) -> ReduceOp:
        try:
            return ReduceOp.parse(op)
        except (TypeError, InvalidArgumentError) as error:
            self.refuse(verb, error, options)

    def _say(self, text: str) -> None:
        if self._verbose:
            logger.info(text)


def build_hierarchy(comm: MPI.Intracomm, options: CommunicationOptions | None, measured: Measured | None) -> Hierarchy:
    """Return the hierarchy of groups over the ranks of `comm`, which is duplicated. A collective call."""
    check_comm(comm)
    bootstrap.start()  # which raises if MPI is finalized, before it is asked anything
    with rendezvous("Communicator", rendezvous_seconds(options), comm) as job:
        given = "" if measured is None else f", measured={measured}"
        job.agree(f"Communicator(options={options}{given})", lambda: check_options(options))
        return Hierarchy(job.comm, job.world)


@cache
def job_communicator() -> Communicator:
    """Return the communicator over all ranks of the job; the first call makes it, and is a collective one."""
    return Communicator(bootstrap.start())


def communicator_of(call: str, communicator: BaseCommunicator | None) -> BaseCommunicator:
    """Return the communicator that a call takes: that of all ranks of the job if it was given None."""
    if not isinstance(communicator, (BaseCommunicator, type(None))):
        raise TypeError(
            f"{call} takes a Communicator, or None for all ranks of the job; got {type(communicator).__name__}.\n"
            f"    incorrect:  {call}(…, MPI.COMM_WORLD)\n"
            f"    correct:    {call}(…, communicator=mpistrat.Communicator(comm)), and others by name: options=…"
        )
    return job_communicator() if communicator is None else communicator


def average_leaves(
    leaves: Sequence[Any], names: Callable[[], Sequence[str]], structure: object, communicator: BaseCommunicator | None
) -> list[Any]:
    """Return the averages over all ranks of the leaves of a nest, whose `names` are for errors. A collective call."""
    communicator = communicator_of("average", communicator)
    with communicator.refusing("average"):
        arrays = each_leaf(_with_mean, leaves, names)
    communicator.note(f"average of {structure}")
    averages = communicator.all_reduce("mean", arrays) if arrays else []
    return list(map(like, averages, leaves))


def _with_mean(leaf: Any, name: str = "value") -> Array:
    array = as_operand(leaf, name)
    if array.dtype.kind in "iu":
        raise UnsupportedDtypeError(f"{name} has dtype {array.dtype}, whose mean would be a whole number: convert it to float")
    return array
