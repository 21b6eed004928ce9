"""Guard: checks every collective call: none has failed before, all ranks arrive in time and make the same call.

A call has a digest, a 64-bit hash of its description. Ranks that make different calls find out before a result is returned:

- ranks of a node compare the digests of their calls at every barrier in shared memory, before one reads what another wrote;
- messages between nodes carry the digest in their tags: those of different calls never match, and `mpistrat.watch` reports it;
- a call that is made for the first time, and every verb that needs the shapes of the other ranks, is compared on all ranks
  first, by a small exchange;
- what is not a collective by itself (a structure, an assignment outside run) is noted, and compared with the next call;
- where MPI reduces arrays between nodes, calls are compared afterwards: every 128 small calls, and before the program ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, TypeVar

from mpistrat.arrays import Array
from mpistrat.errors import CollectiveError, DeadlineExceededError, MpistratError, TransportError, UnavailableError
from mpistrat.execution.engine import Job, back_off, raise_unclaimed_failure, submit, wait_for_gpu
from mpistrat.execution.threads import CallingThread, is_within_call
from mpistrat.execution.work import Work
from mpistrat.groups.agreement import (
    COMPARED,
    Agreement,
    CallsDifferError,
    Completion,
    Signature,
    calls_differ,
    chained,
    digest_of,
    keep_notes,
    notes_text,
)
from mpistrat.groups.deadline_barrier import LONGEST_GRACE_SECONDS, DeadlineBarrier
from mpistrat.groups.group import MOST_UNCONFIRMED, keep_alive_for_peers
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.steps import Steps, drive, ends_soon
from mpistrat.transports.window import NodeWindow
from mpistrat.watch import watcher
from mpistrat.watch.record import RankFile
from mpistrat.watch.recorder import recorder
from mpistrat.watch.states import entered

T = TypeVar("T")

_INDEXES_KEPT, _NOTES_KEPT = 64, 64
_OTHER_THREAD = "another thread is in a collective: make all collectives of a strategy on one thread"
_SAME_THREAD = "this thread is in a collective already: signal handlers, finalizers and callbacks must not make one"
_ANSWER_SECONDS = 1.0  # for ranks to report their call after a deadline has passed
_LEAST_SECONDS = 0.2  # a call that all ranks entered just before the deadline still gets this long
FRAMES = 3  # at least this many frames of this library lie between the recorder's caller and the program

Facts = list[list[int]]
"""Numbers of each rank."""


@dataclass
class Call:
    """A collective call of this rank: what it is, its deadline, and what was noted before it."""

    number: int
    verb: str
    arguments: str  # the call with its arguments
    seconds: float = 0.0  # the deadline, from the beginning of the call; 0 means none
    is_started: bool = False
    ends: float = 0.0  # on the clock of `time.monotonic`; 0: there is no deadline, or the call has not begun
    noted: int = 0  # hash of the notes that are compared with it
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"collective {self.number}, {self.arguments}"

    @property
    def text(self) -> str:
        """The call with its arguments, and with the notes before it that tell something."""
        return f"{self.arguments}{notes_text(self.notes)}"

    def start_clock(self) -> None:
        """Start the clock of the deadline."""
        self.ends = time.monotonic() + self.seconds if self.seconds else 0.0

    @property
    def rest_seconds(self) -> float:
        """The seconds left until the deadline; 0 without a deadline."""
        return max(self.ends - time.monotonic(), _LEAST_SECONDS) if self.ends else 0.0


class Guard:
    """Admits collective calls one at a time, and none after one has failed.

    `number` is that of the last call, and `signature` that of the current or last one; `noted` is the hash of what was
    noted since. `refusal` says why no call can begin at once. `thread` is the one that made the last call, and the lock of
    calls; only its calls may be known ones. `communicator` is the number by which the records of ranks tell
    communicators apart, and `indexes` has that of a call's description in this rank's record, by its digest.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        agreement: Agreement,
        window: NodeWindow | None,
        seconds: float,
        is_checked: bool,
        memory: object,
    ) -> None:
        world = hierarchy.world
        nodes = [world.nodes[world.place(rank).node_index].name for rank in range(world.size)]
        self._deadline_barrier = DeadlineBarrier(hierarchy.world_group, nodes)
        self._agreement, self._memory, self._rank = agreement, memory, hierarchy.rank
        self._current, self._one_node = hierarchy.call, world.num_nodes == 1
        self._window = window if hierarchy.intra.size > 1 else None
        # whether calls are compared even if nothing else has to be exchanged: unless MPISTRAT_CHECK is off
        self.checks, self.number = is_checked, 0
        self.default_seconds = self._seconds = seconds
        self._current.compare_history, self._current.drive = self._compare_history, self.drive_current
        self._current.must_poll = bool(seconds)
        self.refusal, self.noted, self.is_on_gpu = "", 0, False
        self.check_gpu: Callable[[], None] = lambda: None  # raises if what was enqueued on the GPU has been aborted
        self.communicator, self._job_ranks, self._members = hierarchy.number, hierarchy.job_ranks, hierarchy.members
        self.indexes: dict[int, int] = {}
        self._recorder, self._watcher, self._slot = recorder(), watcher.start(), 0
        self.signature = Signature("")
        self._notes = list[str]()
        self._last: Job | None = None
        self._failure, self._number_before = "", 0
        self._cause: BaseException | None = None
        self._told: BaseException | None = None
        self.thread = CallingThread()

    def __enter__(self) -> None:
        """Lock the communicator for this thread."""
        self._acquire()
        try:
            self.wait_for_started()
            if self.is_on_gpu:
                wait_for_gpu(self)
            self.raise_if_failed()
        except BaseException:
            self.thread.unlock()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Unlock the communicator."""
        try:
            if error is not None:
                self._account_for(error, self._slot != 0)
            if self._slot:
                (self._recorder.leave if kind is None else self._recorder.fail)(self._slot)
                self._slot = 0
            self._forget_deadline()
        finally:
            self.thread.unlock()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Lock the communicator for this thread while it starts a call; those started before may be under way."""
        self._acquire()
        try:
            self.raise_if_failed()
            yield
        except BaseException as error:
            self._account_for(error, has_begun=False)
            raise
        finally:
            self.thread.unlock()

    def _acquire(self) -> None:
        """Lock the communicator, if calls of this thread can be told apart from those of others."""
        if not self.thread.lock():
            if self.thread.is_this() and not is_within_call():
                # an exception of a signal handler has left it locked
                why = "a signal handler raised an exception while it began or ended"
                self._fail_and_notify("collective", InterruptedError(why))
                self.raise_if_failed()
            raise self._unavailable(_SAME_THREAD if self.thread.is_this() else _OTHER_THREAD)
        try:
            if not self.thread.is_this():
                self._change_thread()
            self._number_before = self.number
        except BaseException:
            self.thread.unlock()
            raise

    def _change_thread(self) -> None:
        refusal = self.thread.refusal()
        if refusal:
            error = self._unavailable(refusal)
            self.fail("collective", error)
            self._post(self.number + 1, error)
            raise error
        change = self.thread.change()
        if change:
            self.note(change)

    def _account_for(self, error: BaseException, has_begun: bool) -> None:
        """Notify the other ranks of an error of a call that they make, unless they know of it."""
        told, self._told = self._told, None
        if self.number != self._number_before and not (isinstance(error, MpistratError) or error is told or self._failure):
            if not has_begun:
                self.signature = Signature("which had not begun there")
            self._fail_and_notify("collective", error)

    def _forget_deadline(self) -> None:
        self._current.must_poll = bool(self.default_seconds)
        if self._watcher is not None:
            self._watcher.limit = None

    def is_broken(self) -> bool:
        """Return whether a collective has failed, here or on a rank that has reported it."""
        return bool(self._failure) or self._deadline_barrier.is_given_up()

    def raise_if_failed(self) -> None:
        """Raise UnavailableError if a collective has failed."""
        if self._failure:
            raise self._unavailable(self._failure) from self._cause

    def wait_for_started(self) -> None:
        """Wait for all started operations, and raise the first failure that the program has not seen yet."""
        if self._last is not None:
            self._last.join()
            self._last, self.refusal = None, self._failure
            raise_unclaimed_failure(self)

    def start(self, call: Call, carry_out: Callable[[], T]) -> Work[T]:
        """Have the engine run a call after all calls started before; until it has ended no other collective can begin."""
        line, index = self._recorder.line(FRAMES), self.index(digest_of(call.text), call.text)

        def recorded() -> T:
            job.is_claimed = self._cause is not None  # what this one fails of is told already
            self.raise_if_failed()
            slot = self._recorder.enter_started(self.communicator, call.number, index, line)
            try:
                result = carry_out()
            except BaseException as error:
                self._recorder.fail(slot)
                if not (isinstance(error, MpistratError) or self._failure):
                    self._fail_and_notify(call.verb, error)
                raise
            finally:
                self._forget_deadline()
            self._recorder.leave(slot)
            return result

        job = Job(recorded, lambda: str(call), self, self.is_on_gpu)
        self._last, self.refusal = job, f"an earlier {call.verb} is still under way: wait for it first"
        submit(job)
        return Work(job)

    def give_up_started(self, call: Call, error: CollectiveError, is_strict: bool) -> None:
        """Refuse what was started behind a call in which ranks found a difference, unless all ranks make it nevertheless."""
        if is_strict and (self.number == call.number or all(text.startswith(call.verb) for text in error.calls)):
            return
        self.fail(call.verb, error)
        why = f"rank {self._rank} makes no collective after {call}, in which calls differed; make a new strategy on all"
        self._post(call.number + 1, UnavailableError(why))

    def note(self, text: str) -> None:
        """Note what all ranks must do here; it is compared with the next collective."""
        if self.checks:
            self.noted = chained(self.noted, digest_of(text))
            self._notes.append(text)
            if len(self._notes) > _NOTES_KEPT:
                del self._notes[: _NOTES_KEPT // 2]

    def index(self, digest: int, text: str, nbytes: int = 0) -> int:
        """Return the index of a call's description in this process's record."""
        index = self.indexes.get(digest)
        if index is None:
            if len(self.indexes) >= _INDEXES_KEPT:
                self.indexes.clear()
            index = self.indexes[digest] = self._recorder.intern(text, nbytes, digest, self._members)
        return index

    def record_entry(self, call: Call, digest: int) -> None:
        """Record that this rank has entered a call."""
        if not (self._slot or call.is_started):
            index = self.indexes.get(digest) or self.index(digest, call.text, self.signature.nbytes)
            self._slot = self._recorder.enter(self.communicator, call.number, index, FRAMES)

    def take_noted_digest(self, noted: int) -> int:
        """Return the hash of all notes, chained with `noted` if that is not 0; clear the notes."""
        digest = chained(self.noted, noted) if noted else self.noted
        keep_notes(digest, self._notes, noted)
        self.noted, self._notes = 0, []
        return digest

    def next_call(self, verb: str, arguments: str, seconds: float) -> Call:
        """Return a call with the next number, and the notes since the last one.

        MPI's blocking and nonblocking collectives do not match, so ranks compare whether the call has a deadline.
        """
        self.number += 1
        if bool(seconds) != bool(self.default_seconds):
            arguments = f"{arguments} {'with' if seconds else 'without'} a deadline"
        call = Call(self.number, verb, arguments, seconds)
        self._move_notes(call)
        return call

    def _move_notes(self, call: Call) -> None:
        if self._notes:
            call.noted, call.notes = self.noted, tuple(self._notes)
            self.noted, self._notes = 0, []

    def agree(
        self, call: Call, error: Exception | None = None, facts: Sequence[int] = (0, 0), memory: Array | None = None
    ) -> Facts:
        """Wait until all ranks make the same call; return each rank's two `facts`.

        A collective call.

        On a single node ranks may pass bytes, which the window returns until the next call. If calls differ, every rank raises
        an AgreementError, and one that passes an `error` that error.

        Ranks of a node compare digests at a barrier in its memory. Where these are all ranks, none with a deadline or an error,
        that is all; else all ranks compare digests by messages. Where digests differ, all exchange texts, unless a rank has
        gone on without a comparison: then the watcher asks for them.
        """
        text, self._told = call.text, error
        self.signature = Signature(call.arguments)
        self.record_entry(call, self.signature.digest ^ call.noted)
        if self._watcher is not None and call.ends:
            self._watcher.limit = call.ends, lambda: self._blocked_in_mpi(call)
        # also on a rank alone on its node: messages of the call carry it
        self._current.digest = digest_of(text if error is None else f"{text} {error!r}") | COMPARED
        if self._window is not None:
            in_node = self._agree_in_node(self._window, call, error, facts, memory)
            # with a deadline all learn together whether all have arrived in time
            if in_node is not None and self._one_node and error is None and not call.ends:
                return in_node
        found: Facts = self._agreement.check(text, error, self._completion(call), facts, call.number).tolist()
        return found

    def _agree_in_node(
        self, window: NodeWindow, call: Call, error: Exception | None, facts: Sequence[int], memory: Array | None
    ) -> Facts | None:
        """Compare a call in the memory of the node, and return the facts of its ranks; None if all ranks will differ."""
        try:
            steps = window.barrier_with(facts, memory)
            if not ends_soon(steps):
                self.run(call, steps)
        except CallsDifferError as differ:
            all_compare = differ.all_compare
        else:
            return window.facts()
        if not all_compare:
            raise self._fail_with(call, self._mismatch(call.text))
        if self._one_node:
            self._agreement.raise_on_all(call.text, error, call.number, self._completion(call))
        return None

    def refuse(self, call: Call, error: Exception) -> NoReturn:
        """Raise the error of a call that this rank cannot make; ranks that make it see it in this rank's record."""
        text = f"{call.text}, which failed: {type(error).__name__}: {error}"
        self._told = error
        self.record_entry(replace(call, arguments=text, notes=()), digest_of(text))
        raise error

    def make_current(self, call: Call, signature: Signature) -> None:
        """Make a call the current one. The signature describes it without its notes."""
        self.signature = signature
        self._current.digest = digest = signature.digest ^ call.noted
        self.record_entry(call, digest)
        self._current.must_poll = bool(call.seconds) or call.is_started
        self._current.count()

    def run(self, call: Call, steps: Steps, is_arriving: bool = False) -> None:
        """Run the steps of a call within the rest of its time. After a failure no other collective can be made.

        Those of a deadline barrier (`is_arriving`) watch the deadline and the messages of peers themselves.
        """
        what, back = partial(str, call), back_off if call.is_started else None
        try:
            if is_arriving:
                drive(steps, what, back_off=back, check=self._raise_verdict)
            else:
                seconds = call.rest_seconds
                self._current.ends = time.monotonic() + seconds if seconds else 0.0
                drive(steps, what, seconds, lambda: self._overdue(what(), call.seconds), back, self._check_progress)
        except BaseException as error:
            if isinstance(error, CallsDifferError) and self._current.digest & COMPARED:
                raise
            understood = self._diagnosed(error, call.text)
            self._fail_and_notify(call.verb, understood)
            if understood is error:
                raise
            raise understood from None

    def drive_current(self, steps: Steps) -> None:
        """Run steps of a call on a fast path, under the default deadline, or that of `begin_limit`."""
        seconds = self._seconds
        self._current.ends = time.monotonic() + seconds if seconds else 0.0
        what = self._describe_current
        drive(steps, what, seconds, lambda: self._overdue(what(), seconds), None, self._check_progress)

    def begin_limit(self, seconds: float) -> None:
        """Give a call on a fast path a deadline of its own, or none, which is 0; raise if other ranks have given it up."""
        self._seconds, self._current.must_poll = seconds, bool(seconds)
        if seconds:
            self._deadline_barrier.raise_if_given_up(self._describe_current)

    def end_limit(self) -> None:
        """Give calls on fast paths the default deadline again."""
        self._seconds, self._current.must_poll = self.default_seconds, bool(self.default_seconds)

    def raise_if_given_up(self, call: Call) -> None:
        """Raise if other ranks have given up a call with a deadline that they do not compare before it runs."""
        try:
            self._deadline_barrier.raise_if_given_up(lambda: str(call))
        except CollectiveError as error:
            raise self._fail_with(call, error) from None

    def fail_current(self, error: BaseException) -> BaseException:
        """Return the error to raise for what a call on a fast path raised; no other collective can be made."""
        error = self._diagnosed(error, self.signature.text_after(self._current.digest ^ self.signature.digest))
        self._fail_and_notify(self.signature.text.partition("(")[0], error)
        return error

    def allocate(self, make: Callable[[], T], verb: str = "all_reduce") -> T:
        """Return what `make` allocates for the call of `verb` that this rank is in; without memory the others are told."""
        try:
            return make()
        except MemoryError as error:
            raise self.no_memory(error, verb) from None

    def no_memory(self, error: MemoryError, verb: str = "all_reduce") -> TransportError:
        """Tell the other ranks that this one has no memory for a call, and return the error to raise."""
        self.give_up()
        self.fail(verb, error)
        return TransportError(
            f"rank {self._rank}: no memory for the results ({error}); pass out=, or smaller arrays, or free some of "
            "CuPy's: cupy.get_default_memory_pool().free_all_blocks()"
        )

    def give_up(self) -> None:
        """Notify all ranks that this one will not make any further collective."""
        self._deadline_barrier.give_up()

    def fail(self, verb: str, error: BaseException) -> None:
        """Refuse all further collectives: one has failed here, and ranks may be out of step."""
        self._cause, why = error, f"did not end ({type(error).__name__}), and ranks may be out of step"
        self.refusal = self._failure = f"an earlier {verb} {why}; make a new strategy"
        self._current.has_failed = True
        if self._watcher is not None:
            self._watcher.dismiss(self.communicator)
        keep_alive_for_peers(self._memory)

    def _fail_and_notify(self, verb: str, error: BaseException) -> None:
        """Refuse all further collectives, and notify the other ranks of an error that they do not find by themselves."""
        self.fail(verb, error)
        if not isinstance(error, CollectiveError):
            where = f"rank {self._rank} has left collective {self.number}, {self.signature.text}"
            raised = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            why = UnavailableError(f"{where}, where it raised {raised}. Ranks may be out of step; make a new strategy on all")
            self._post(self.number, why)

    def _post(self, number: int, error: CollectiveError) -> None:
        """Make the other ranks raise an error in a collective, or in a later one."""
        if self._watcher is not None:
            self._watcher.post_failure((self.communicator, number), error)

    def refuse_from_now_on(self, why: str) -> None:
        """Refuse all further collectives."""
        self.refusal = self._failure = why
        self._cause = self._last = None

    def refuse_in_child(self) -> None:
        """Refuse all collectives in a process that was forked from a rank."""
        who = f"process {os.getpid()} was forked from rank {self._rank}, and is not a rank itself"
        self.refuse_from_now_on(f"{who}; compute there, and let the parent communicate")
        self.thread = CallingThread()

    def confirm(self) -> None:
        """Compare the calls that have not been compared yet. A collective call if there are any."""
        if self._current.unconfirmed:
            with self:
                self.number += 1
                self.signature = Signature("confirm()")
                call = Call(self.number, "confirm", self.signature.text, self.default_seconds)
                self.record_entry(call, self.signature.digest)
                self._current.confirm()

    def _compare_history(self, history: int) -> None:
        """Compare the calls that MPI has reduced since the last comparison; name the first that differs. A collective call."""
        call = Call(self.number, "all_reduce", "the calls that MPI combined last", self.default_seconds)
        found = self._agreement.check(call.text, None, self._completion(call), (history, 0))
        if all(history == other for other, *_ in found.tolist()):
            return
        calls = RankFile(self._recorder.memory).calls()
        # the last call of a number: those before it were refused
        mine = {call.number: call.text for call in reversed(calls) if call.communicator == self.communicator}
        recent = sorted(mine)[-MOST_UNCONFIRMED - 1 :]
        sent = self._agreement.exchange([(number, mine[number]) for number in recent], self._completion(call))
        every: list[dict[int, str]] = [dict(pairs) for pairs in sent]
        number = next((n for n in recent if len({texts.get(n) for texts in every}) > 1), self.number)
        error = calls_differ(number, {rank: texts.get(number, "another") for rank, texts in enumerate(every)})
        raise self._fail_with(call, error)

    def _completion(self, call: Call) -> Completion:
        """Return what completes an exchange of all ranks before the deadline of a call, or fails the communicator."""
        steps, absent = self._deadline_barrier.steps, self._absent
        return lambda enter: self.run(call, steps(enter, lambda: str(call), call.seconds, absent), is_arriving=True)

    def _check_progress(self) -> None:
        """Raise if the current call is known not to end."""
        self._raise_verdict()
        # a rank whose own deadline is about to pass names the missing ranks itself
        is_last_moment = self._current.ends and self._current.ends - time.monotonic() < LONGEST_GRACE_SECONDS
        if not is_last_moment and self._deadline_barrier.is_given_up():
            raise self._deadline_barrier.given_up(self._describe_current(), self._missing())

    def _raise_verdict(self) -> None:
        if self._watcher is not None:
            self._watcher.raise_verdict()
        self.check_gpu()

    def _describe_current(self) -> str:
        return f"collective {self.number}, {self.signature.text}"

    def _overdue(self, what: str, seconds: float) -> DeadlineExceededError:
        """Notify all ranks that this one gives up the call, and return the error that names the ranks that do not answer."""
        self._current.has_failed = True
        return self._deadline_barrier.overdue(what, seconds, self._missing())

    def _blocked_in_mpi(self, call: Call) -> DeadlineExceededError:
        """Return the error of a call whose deadline has passed while this rank is blocked in MPI."""
        return DeadlineExceededError(
            f"rank {self._rank}: {call} did not end within {call.seconds:g} s: this rank waits in a call of MPI that does not "
            "return, for ranks that have stopped or ended"
        )

    def _missing(self) -> list[int]:
        """Return the ranks that have not arrived, as far as this node's memory and the records of all ranks show."""
        missing = set() if self._window is None else set(self._window.missing())
        # what was started is compared first; meanwhile the program may have started more, which `number` counts
        is_known = self._one_node or (self._last is not None and not missing)
        return sorted(missing if is_known else missing | self._absent())

    def _absent(self) -> set[int]:
        """Return the ranks that are known not to have entered the current call."""
        if self._watcher is None:
            return set()
        states = self._watcher.compare(_ANSWER_SECONDS, self._job_ranks)
        came = entered(states, (self.communicator, self.number))
        return {rank for rank, state in enumerate(states) if state.state != "unknown" and state.rank not in came}

    def _diagnosed(self, error: BaseException, text: str) -> BaseException:
        """Return the error that explains `error`: truncated MPI messages, for instance, come from ranks in different calls."""
        from mpi4py import MPI

        if isinstance(error, CallsDifferError):
            return self._mismatch(text)
        if isinstance(error, MPI.Exception) and len(set(self._texts(text).values())) > 1:
            return self._mismatch(text)
        return error

    def _mismatch(self, text: str) -> CollectiveError:
        """Return the error that names each rank's call, and send it to the other ranks."""
        error = calls_differ(self.number, self._texts(text))
        self._post(self.number, error)
        return error

    def _texts(self, text: str) -> dict[int, str]:
        """Return the description of each rank's current call; `text` is this rank's."""
        texts = {self._rank: text}
        states = [] if self._watcher is None else self._watcher.compare(ranks=self._job_ranks)
        calls = entered(states, (self.communicator, self.number))
        for rank, state in enumerate(states):
            found = calls.get(state.rank)
            texts.setdefault(rank, found.text if found else f"({state.doing()})")
        return texts

    def _fail_with(self, call: Call, error: CollectiveError) -> CollectiveError:
        self.fail(call.verb, error)
        return error

    def _unavailable(self, why: str) -> UnavailableError:
        return UnavailableError(f"rank {self._rank}: no further collective can be made: {why}")
