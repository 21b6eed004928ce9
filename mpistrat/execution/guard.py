"""Guard: admits the collective calls of a communicator one at a time, and none after one has failed, here or on another rank.

Each call begins here: its options are merged, its arguments checked, and its deadline counts. `comparison` tells whether all
ranks make the same call, and `deadlines` whether they come in time; here their errors are told to the other ranks.

At the end of the program all communicators compare their last calls, and refuse later ones, as in a forked child.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from mpistrat import ending
from mpistrat.arrays import Array
from mpistrat.errors import CollectiveError, MpistratError, UnavailableError
from mpistrat.execution.comparison import Call, Comparison, Facts
from mpistrat.execution.deadlines import Deadlines
from mpistrat.execution.engine import Job, Work, has_unclaimed_failure, raise_unclaimed_failure, submit, wait_for_gpu
from mpistrat.execution.threads import CallingThread, is_within_call
from mpistrat.groups.agreement import (
    COMPARED,
    Agreement,
    CallsDifferError,
    Signature,
    chained,
    digest_of,
    failed_text,
    keep_notes,
)
from mpistrat.groups.group import PROBES, keep_alive_for_peers
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch import abort
from mpistrat.steps import Steps
from mpistrat.transports.window import NodeWindow, free_open_windows, is_freed_by_mpi
from mpistrat.watch import watcher
from mpistrat.watch.recorder import recorder

T = TypeVar("T")

_NOTES_KEPT = 64
_REFUSED = "a refused "
_NOT_BEGUN = "a call that has not begun"  # but on other ranks: what this one calls next is another call
_OTHER_THREAD = "another thread is in a collective: make all collectives of a strategy on one thread"
_SAME_THREAD = "this thread is in a collective already: signal handlers, finalizers and callbacks must not make one"


class Guard:
    """Admits collective calls one at a time, and none after one has failed.

    `options` are the defaults of calls, CommunicationOptions. `number` is that of the last call, and `signature` that of the
    current or last one that `Passing` did not make; `noted` is the hash of what was noted since. `refusal` says why no call can
    begin at once. `thread` is the one that made the last call, and the lock of calls; only its calls may be known ones.
    `communicator` is the number by which the records of ranks tell communicators apart, and `indexes` has that of a call's
    description in this rank's record, by its digest.
    """

    def __init__(
        self, hierarchy: Hierarchy, agreement: Agreement, window: NodeWindow | None, options: Any, memory: object
    ) -> None:
        window = window if hierarchy.intra.size > 1 else None
        self.options = options
        self.refusal, self.noted, self.is_on_gpu = "", 0, False
        self.number, self.signature = 0, Signature("")
        self.communicator, self._members, self._rank = hierarchy.number, hierarchy.members, hierarchy.job_rank
        self.thread = CallingThread()
        seconds = options.timeout_seconds or 0.0
        self.deadlines = Deadlines(hierarchy, window, seconds, lambda: (self.number, self.signature.text))
        self._comparison = Comparison(hierarchy, agreement, window)
        self._present, self._memory = hierarchy.call, memory
        self._present.compare_history = self._compare_history
        self._recorder, self._watcher, self._slot = recorder(), watcher.start(), 0
        self.indexes = self._recorder.indexes[self._members]
        self._notes = list[str]()
        self._last: Job | None = None
        self._outdated = self._recorder.outdated  # when that was started
        self._failure, self._number_before = "", 0
        self._cause: BaseException | None = None
        self._told: BaseException | None = None

    def __enter__(self) -> None:
        """Lock the communicator for this thread."""
        self.acquire()
        try:
            self.wait_for_started()
            if self.is_on_gpu:
                wait_for_gpu(self)
            self.raise_if_failed()
        except BaseException:
            self.note(_NOT_BEGUN)
            self.thread.unlock()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Unlock the communicator."""
        try:
            if error is not None:
                self.account_for(error, self._slot != 0)
            if self._slot:
                (self._recorder.leave if kind is None else self._recorder.fail)(self._slot)
                self._slot = 0
            self.deadlines.end()
        finally:
            self.thread.unlock()

    def acquire(self) -> None:
        """Lock the communicator, if calls of this thread can be told apart from those of others."""
        if (self._last is not None and self._last.runs_here()) or not self.thread.lock():
            if self.thread.is_this() and not is_within_call():
                # an exception of a signal handler has left it locked
                why = "a signal handler raised an exception while it began or ended"
                self.signature = Signature("which had not begun there")
                self._fail_and_notify("collective", InterruptedError(why))
                self.raise_if_failed()
            if self.thread.is_this():
                self.note(f"{_REFUSED}call within another one")  # which ranks between two calls have made
                raise self._unavailable(_SAME_THREAD)
            raise self._unavailable(_OTHER_THREAD)
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

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Lock the communicator for this thread while it starts a call; those started before may be under way."""
        self.acquire()
        try:
            self.raise_if_failed()
            yield
        except BaseException as error:
            self.account_for(error, has_begun=False)
            raise
        finally:
            self.thread.unlock()

    def account_for(self, error: BaseException, has_begun: bool) -> None:
        """Notify the other ranks of an error of a call that they make, unless they know of it."""
        told, self._told = self._told, None
        if isinstance(error, MpistratError) or error is told or self._failure:
            return
        if self.number == self._number_before:
            self.note(_NOT_BEGUN)
            return
        if not has_begun:
            self.signature = Signature("which had not begun there")
        self._fail_and_notify("collective", error)

    def is_broken(self) -> bool:
        """Return whether a collective has failed, here or on a rank that has reported it."""
        return bool(self._failure) or self.deadlines.barrier.is_given_up()

    def forgiving(self) -> AbstractContextManager[None]:
        """Return a context of the last call here; where this rank has refused the one before, others may have given up both."""
        has_refused = any(text == _NOT_BEGUN or text.startswith(_REFUSED) for text in self._notes)
        return suppress(CollectiveError) if has_refused else nullcontext()

    def raise_if_failed(self) -> None:
        """Raise UnavailableError if a collective has failed."""
        if self._failure:
            raise self._unavailable(self._failure) from self._cause

    def wait_for_started(self) -> None:
        """Wait for all started operations, and raise the first failure that the program has not seen yet."""
        last = self._last
        if last is not None:
            last.join()
            if self._last is last and not last.runs_here():  # another thread may have started more
                self._last, self.refusal = None, self._failure
            raise_unclaimed_failure(self)

    def is_clear(self) -> bool:
        """Return whether a call can begin at once: `refusal` may speak of what was started and has ended.

        One that ranks have forgotten meanwhile is looked at again.
        """
        last = self._last
        try:
            if last is not None and not last.runs_here() and last.has_ended() and self.thread.lock():
                if self._last is last and self._recorder.outdated is self._outdated and not has_unclaimed_failure(self):
                    self._last, self.refusal = None, self._failure
                self.thread.unlock()
        except BaseException:  # of a signal handler, while this rank completes what was started
            self.note(_NOT_BEGUN)
            raise
        return not self.refusal

    def start(self, call: Call, carry_out: Callable[[], T], complete: Callable[[], T | None] | None = None) -> Work[T]:
        """Have the engine run a call after all calls started before; until it has ended no other collective can begin.

        One that has begun, and that `complete` can complete, is left to the thread that asks for its result.
        """
        line, index = self._recorder.find_line(sys._getframe(1)), self.index(call.digest, call.text, call.signature.nbytes)

        def recorded() -> T:
            job.is_claimed = self._cause is not None  # what this one fails of is told already
            self.raise_if_failed()
            slot = self._recorder.enter(self.communicator, call.number, index, line)
            try:
                result = carry_out()
            except BaseException as error:
                self._recorder.fail(slot)
                if not (isinstance(error, MpistratError) or self._failure):
                    self._fail_and_notify(call.verb, error)
                raise
            finally:
                self.deadlines.end()
            self._recorder.leave(slot)
            return result

        if self._last is not None:
            self._last.submit()  # which comes first
        job = Job(recorded, lambda: str(call), self, self.is_on_gpu, complete)
        if complete is None:
            submit(job)  # before it is one to wait for: a signal handler that raises in there may leave it unsubmitted
        self._last, self.refusal = job, f"an earlier {call.verb} is still under way: wait for it first"
        self._outdated = self._recorder.outdated
        return Work(job)

    def give_up_started(self, call: Call, error: CollectiveError) -> None:
        """Refuse what was started behind a call in which ranks found a difference, unless all ranks make it nevertheless."""
        if self._present.is_strict and (self.number == call.number or all(text.startswith(call.verb) for text in error.calls)):
            return
        self.fail(call.verb, error)
        why = f"rank {self._rank} makes no collective after {call}, in which calls differed; make a new strategy on all"
        self._post(call.number + 1, UnavailableError(why))

    def note(self, text: str) -> None:
        """Note what all ranks must do here; it is compared with the next collective."""
        self.noted = chained(self.noted, digest_of(text))
        self._notes.append(text)
        if len(self._notes) > _NOTES_KEPT:
            del self._notes[: _NOTES_KEPT // 2]

    def index(self, digest: int, text: str, nbytes: int = 0) -> int:
        """Return the index of a call's description in this process's record."""
        return self.indexes.get(digest) or self._recorder.intern(text, nbytes, digest, self._members)

    def _record_entry(self, call: Call) -> None:
        """Record that this rank has entered a call."""
        if not (self._slot or call.is_started):
            index = self.indexes.get(call.digest) or self.index(call.digest, call.text, call.signature.nbytes)
            self._slot = self._recorder.enter(self.communicator, call.number, index)

    def take_noted_digest(self, noted: int) -> int:
        """Return the hash of all notes, chained with `noted` if that is not 0; clear the notes."""
        digest = chained(self.noted, noted) if noted else self.noted
        keep_notes(digest, self._notes, noted)
        self.noted, self._notes = 0, []
        return digest

    def begin(
        self, verb: str, options: object, ask: Callable[[Any], T], check: Callable[[T], None] | None = None
    ) -> tuple[Call, T]:
        """Return a numbered call that has begun, and what it asks for; raise if this rank cannot make it.

        `ask` returns that for the merged options: its text must be the same on all ranks. `check` raises if this rank cannot
        make the call.
        """
        call, asked, refused = self.prepare(verb, options, ask, check)
        call.start_clock()
        if refused is not None:
            self.refuse(call, refused)
        return call, asked

    def prepare(
        self, verb: str, options: object, ask: Callable[[Any], T], check: Callable[[T], None] | None = None
    ) -> tuple[Call, T, Exception | None]:
        """Return what `begin` does, before the call begins, and the error of its arguments if this rank refuses them."""
        wanted: Any = self.options
        asked: T | None = None
        refused: Exception | None = None
        try:
            wanted = self.options.merge(options)
            asked = ask(wanted)
            if check is not None:
                check(asked)
        except Exception as error:
            refused = error
        asked = ask(wanted) if asked is None else asked
        return self._next_call(verb, f"{verb}{asked}", wanted), asked, refused

    def begin_text(self, text: str, options: object) -> Call:
        """Return a numbered call that has begun, described by a text; the call itself refuses `options` that are invalid."""
        verb, bracket, arguments = text.partition("(")
        call, *_ = self.prepare(verb, options, lambda _: bracket + arguments)  # options may contradict the communicator's
        call.start_clock()
        return call

    def _next_call(self, verb: str, arguments: str, options: Any) -> Call:
        """Return a call with the next number, and the notes since the last one.

        MPI's blocking and nonblocking collectives do not match, so ranks compare whether the call has a deadline.
        """
        seconds = options.timeout_seconds or 0.0
        self.number += 1
        if bool(seconds) != bool(self.deadlines.default_seconds):
            arguments = f"{arguments} {'with' if seconds else 'without'} a deadline"
        call = Call(self.number, verb, Signature(arguments), seconds)
        self._move_notes(call)
        return call

    def _move_notes(self, call: Call) -> None:
        if self._notes:
            call.noted, call.notes = self.noted, tuple(self._notes)
            self.noted, self._notes = 0, []

    def take_back(self, call: Call) -> None:
        """Take back a call that all ranks make in another way, or this one not at all: the next has its number and notes."""
        self.number -= 1
        meanwhile, self.noted, self._notes = self._notes, call.noted, list(call.notes)
        for text in meanwhile:  # of a signal handler
            self.note(text)

    def agree(
        self, call: Call, error: Exception | None = None, facts: Sequence[int] = (0, 0), memory: Array | None = None
    ) -> Facts:
        """Wait until all ranks make the same call; return each rank's two `facts`.

        A collective call.

        Ranks may pass bytes, which the window of a single node, or the rows of several, have until the next call. If calls
        differ, every rank raises an AgreementError, and one that passes an `error` that error.
        """
        self._told = error
        self.signature = call.signature
        recorded = call if error is None else _failed(call, error)
        self._record_entry(recorded)
        if call.ends:
            self.raise_if_given_up(call, PROBES)
            self.deadlines.watch(call)
        try:
            arrive = partial(self._within, call, self.deadlines.arrive)
            return self._comparison.agree(call, error, facts, memory, self.run, arrive)
        except CallsDifferError as differ:
            failure = self._fail_with(call, self._understood(differ, call.number, recorded.text))
            raise (error or failure) from None

    def refuse(self, call: Call, error: Exception) -> NoReturn:
        """Raise the error of a call that this rank cannot make; ranks that make it see it in this rank's record.

        With MPISTRAT_STRICT all ranks raise together.
        """
        if self._present.is_strict:
            try:
                self.agree(call, error)
            except CollectiveError:  # the watcher may have compared the calls before
                raise error from None
        if self._watcher is not None:
            self._watcher.refuse(self.communicator, call.number)
        self.take_back(call)  # the other ranks have not made it, or wait in it for this one
        self.note(f"{_REFUSED}{call.verb}")  # they wait in vain: what this one calls next is another call
        self._told = error
        self._record_entry(_failed(call, error))
        raise error

    def make_current(self, call: Call) -> None:
        """Make a call the current one."""
        self.signature, self._present.digest = call.signature, call.digest
        self._record_entry(call)
        self.deadlines.begin(call)
        self._present.count()

    def run(self, call: Call, steps: Steps) -> None:
        """Run the steps of a call within its time. After a failure no other collective can be made."""
        self._within(call, self.deadlines.run, steps)

    def _within(self, call: Call, act: Callable[[Call, Any], None], what: Any) -> None:
        try:
            act(call, what)
        except BaseException as error:
            if isinstance(error, CallsDifferError) and self._present.digest & COMPARED:
                raise
            understood = self._understood(error, call.number, call.text)
            self._fail_and_notify(call.verb, understood)
            if understood is error:
                raise
            raise understood from None

    def raise_if_given_up(self, call: Call, probes: int = 1) -> None:
        """Raise if other ranks have given up a call with a deadline that they do not compare before it runs."""
        try:
            self.deadlines.barrier.raise_if_given_up(lambda: str(call), probes=probes)
        except CollectiveError as error:
            raise self._fail_with(call, error) from None

    def fail_current(self, error: BaseException) -> BaseException:
        """Return the error to raise for what a call on a fast path raised; no other collective can be made."""
        error = self._understood(error, self.number, self.signature.text_after(self._present.digest ^ self.signature.digest))
        self._fail_and_notify(self.signature.text.partition("(")[0], error)
        return error

    def fail(self, verb: str, error: BaseException) -> None:
        """Refuse all further collectives: one has failed here, and ranks may be out of step."""
        self._cause, why = error, f"did not end ({type(error).__name__}), and ranks may be out of step"
        self.refusal = self._failure = f"an earlier {verb} {why}; make a new strategy"
        self._present.has_failed = True
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
        self.wait_for_started()  # until then ranks may not agree on whether there are any
        if self._present.unconfirmed:
            with self:
                self.number += 1
                self.signature = Signature("confirm()")
                self._record_entry(Call(self.number, "confirm", self.signature))
                self._present.confirm()

    def _compare_history(self, history: int) -> None:
        """Compare the calls that MPI has reduced since the last comparison; name the first that differs. A collective call."""
        combined = Signature("the calls that MPI combined last")
        call = Call(self.number, "all_reduce", combined, self.deadlines.default_seconds)
        call.start_clock()
        error = self._comparison.history(call, history, self.run, partial(self._within, call, self.deadlines.arrive))
        if error is not None:
            raise self._fail_with(call, error)

    def _understood(self, error: BaseException, number: int, text: str) -> BaseException:
        """Return the error that explains `error`, and send it to the other ranks if their calls differ from this one."""
        difference = self._comparison.difference(error, number, text)
        if difference is None:
            return error
        self._post(number, difference)
        return difference

    def _fail_with(self, call: Call, error: BaseException) -> BaseException:
        self.fail(call.verb, error)
        return error

    def _unavailable(self, why: str) -> UnavailableError:
        return UnavailableError(f"rank {self._rank}: no further collective can be made: {why}")


def _failed(call: Call, error: Exception) -> Call:
    """Return a call that a rank cannot make, as it is recorded."""
    return replace(call, signature=Signature(failed_text(call.text, error)), noted=0, notes=())


_guards: WeakSet[Guard] = WeakSet()


def compare_at_end(guard: Guard) -> None:
    """Take part in the end of the program: the communicator of this guard compares and refuses calls then."""
    _guards.add(guard)
    ending.watch_finalize()


def forget(guard: Guard) -> None:
    """Do nothing more with a guard whose communicator is closed: its groups are freed."""
    _guards.discard(guard)


def _before_finalize() -> None:
    _refuse("the program has called MPI_Finalize; do that after the last collective")


def _free_windows(all_say: Callable[[bool], bool]) -> None:
    """Refuse later calls, and free windows, unless a thread is in a call on some rank: a daemon's would read what is freed."""
    guards = list(_guards)
    _refuse("the programs of all ranks have ended: this exit handler is called too late; register it after the first strategy")
    if all_say(not any(guard.thread.is_locked() for guard in guards)):
        free_open_windows()
    elif not is_freed_by_mpi():  # the job would wait in MPI_Finalize for ever
        why = "the program has ended while a thread of some rank is in a collective: stop such threads, and join them, first"
        abort.end(UnavailableError(why))


def _refuse(why: str) -> None:
    for guard in list(_guards):
        guard.refuse_from_now_on(why)
    _guards.clear()


def _confirm() -> None:
    if abort.ending_code() == 0:
        try:
            for guard in sorted(_guards, key=lambda guard: guard.communicator):
                if not guard.is_broken():
                    with guard.forgiving():
                        guard.confirm()
                if not guard.is_broken():  # those who waited in a call that was refused here have left it
                    guard.confirm()
        except Exception as error:
            abort.end(error)


def _refuse_in_child() -> None:
    for guard in list(_guards):
        guard.refuse_in_child()


ending.at(ending.Stage.COMPARE, _confirm)
ending.at(ending.Stage.REFUSE, _before_finalize)
ending.at(ending.Stage.FREE, _free_windows)
os.register_at_fork(after_in_child=_refuse_in_child)
