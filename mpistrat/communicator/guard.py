"""CollectiveGuard: checks every collective call: none has failed before, all ranks arrive in time and make the same call.

A call has a digest, a 64-bit hash of its description. Ranks that make different calls find out before a result is returned:

- ranks of a node compare the digests of their calls at every barrier in shared memory, before one reads what another wrote;
- messages between nodes carry the digest in their tags: those of different calls never match, and `mpistrat.watch` reports it;
- a call that is made for the first time, and every verb that needs the shapes of the other ranks, is compared on all ranks
  first, by a small exchange;
- what is not a collective by itself (a structure, an assignment outside run) is noted, and compared with the next call;
- where MPI reduces arrays between nodes, calls are compared afterwards: every 64 small calls, and before the program ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn, TypeVar

import numpy as np

from mpistrat import settings
from mpistrat.communicator.call import CollectiveCall
from mpistrat.communicator.lifetime import follow
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import CollectiveError, DeadlineExceededError, UnavailableError
from mpistrat.execution.engine import Job, back_off, raise_unclaimed_failure, submit, wait_for_gpu
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
)
from mpistrat.groups.deadline_barrier import LONGEST_GRACE_SECONDS, DeadlineBarrier
from mpistrat.groups.group import MOST_UNCONFIRMED
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.groups.left_memory import leave_to_peers
from mpistrat.launch import abort
from mpistrat.transports.steps import Steps, drive
from mpistrat.transports.window import NodeWindow
from mpistrat.watch.reader import RankFile
from mpistrat.watch.recorder import recorder
from mpistrat.watch.watcher import start

__all__ = ["FRAMES", "CollectiveGuard"]

T = TypeVar("T")

_INDEXES_KEPT, _NOTES_KEPT = 64, 64
_OTHER_THREAD = "another thread is in a collective: make all collectives of a strategy on one thread"
_ANSWER_SECONDS = 1.0  # for ranks to report their call after a deadline has passed
FRAMES = 3  # at least this many frames of this library lie between the recorder's caller and the program


class CollectiveGuard:
    """Admits collective calls one at a time, and none after one has failed.

    Parameters
    ----------
    hierarchy : Hierarchy
        The ranks that call.
    agreement : Agreement
        Compares the calls of all ranks.
    window : NodeWindow or None
        Shared memory of the ranks of this node, if there are several and they share some.
    options : CommunicationOptions
        Defaults of the communicator; calls on fast paths have its deadline.
    memory : object
        The memory of the communicator; never freed once a collective has failed.

    Attributes
    ----------
    number : int
        Sequence number of the last collective.
    refusal : str
        Why a collective cannot begin at once, or an empty text.
    checks : bool
        Whether calls are compared even if nothing else has to be exchanged: unless MPISTRAT_CHECK is off.
    lock : Lock
        Held by the thread that is in a collective.
    is_on_gpu : bool
        Whether calls may work on this process's GPU.
    noted : int
        Hash of what was noted since the last collective.
    signature : Signature
        Of the current call, or the last one.
    communicator : int
        Number of the hierarchy, by which the records of ranks tell communicators apart.
    indexes : dict
        Index of a call's description in this process's record, by the digest of the call.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        agreement: Agreement,
        window: NodeWindow | None,
        options: CommunicationOptions,
        memory: object,
    ) -> None:
        world = hierarchy.world
        nodes = [world.nodes[world.place(rank).node_index].name for rank in range(world.size)]
        self._deadline_barrier = DeadlineBarrier(hierarchy.world_group, nodes)
        self._agreement, self._memory, self._rank = agreement, memory, hierarchy.rank
        self._present, self._one_node = hierarchy.call, world.num_nodes == 1
        self._window = window if hierarchy.intra.size > 1 else None
        self._options, self.checks, self.number = options, settings.CHECK.read(), 0
        self._present.confirm, self._present.drive = self._confirm, self.drive_current
        self._present.must_poll = bool(options.timeout_seconds)
        self.lock, self.refusal, self.noted, self.is_on_gpu = threading.Lock(), "", 0, False
        self.communicator, self._job_ranks, self._members = hierarchy.number, hierarchy.job_ranks, hierarchy.members
        self.indexes: dict[int, int] = {}
        self._recorder, self._watcher, self._slot = recorder(), start(), 0
        self.signature = Signature("")
        self._any_deadline, self._notes = False, list[str]()
        self._last: Job | None = None
        self._last_thread, self._ends, self._failure = 0, 0.0, ""
        self._cause: BaseException | None = None
        follow(self)

    def __enter__(self) -> None:
        """Lock the communicator for this thread.

        Raises
        ------
        UnavailableError
            If another thread is in a collective, this process is a fork of a rank, or a collective has failed.
        """
        if self._last is not None:
            self._require_same_thread()
            self.wait_for_started()
        if self.is_on_gpu:
            wait_for_gpu(self)
        if not self.lock.acquire(blocking=False):
            raise self._refused(_OTHER_THREAD)
        if self._failure:
            self.lock.release()
            raise self._refused(self._failure) from self._cause

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Unlock the communicator."""
        if self._slot:
            (self._recorder.leave if kind is None else self._recorder.fail)(self._slot)
            self._slot = 0
        self._forget_deadline()
        self.lock.release()

    def _forget_deadline(self) -> None:
        self._present.must_poll, self._any_deadline = bool(self._options.timeout_seconds), False
        if self._watcher is not None:
            self._watcher.limit = None

    def is_broken(self) -> bool:
        """Return whether a collective has failed, here or on a rank that has reported it."""
        return bool(self._failure) or self._deadline_barrier.is_given_up()

    def raise_if_failed(self) -> None:
        """Raise UnavailableError if a collective has failed."""
        if self._failure:
            raise self._refused(self._failure) from self._cause

    def require_startable(self) -> None:
        """Raise UnavailableError if a collective has failed, or another thread is in one."""
        self.raise_if_failed()
        self._require_same_thread()
        if self._last is None and self.lock.locked():
            raise self._refused(_OTHER_THREAD)

    def wait_for_started(self) -> None:
        """Wait for all started operations, and raise the first failure that the program has not seen yet."""
        if self._last is not None:
            self._last.join()
            self._last, self.refusal = None, self._failure
            raise_unclaimed_failure(self)

    def start(self, call: CollectiveCall, carry_out: Callable[[], T]) -> Work[T]:
        """Have the engine run a call after all calls started before; until it has ended no other collective can begin."""
        line, index = self._recorder.line(FRAMES), self.index(digest_of(call.text), call.verb, call.text)

        def locked() -> T:
            with self.lock:
                slot = self._recorder.enter_started(self.communicator, call.number, index, line)
                try:
                    result = carry_out()
                except BaseException:
                    self._recorder.fail(slot)
                    raise
                finally:
                    self._forget_deadline()
                self._recorder.leave(slot)
                return result

        job = Job(locked, lambda: str(call), self, self.is_on_gpu)
        self._last, self.refusal, self._last_thread = job, _still_running(call.verb), threading.get_ident()
        submit(job)
        return Work(job)

    def note(self, text: str) -> None:
        """Note what all ranks must do here; it is compared with the next collective."""
        if self.checks:
            self.noted = chained(self.noted, digest_of(text))
            self._notes.append(text)
            if len(self._notes) > _NOTES_KEPT:
                del self._notes[: _NOTES_KEPT // 2]

    def index(self, digest: int, verb: str, text: str, details: tuple[str, str, int, str] = ("", "", 0, "")) -> int:
        """Return the index of a call's description in this process's record."""
        index = self.indexes.get(digest)
        if index is None:
            if len(self.indexes) >= _INDEXES_KEPT:
                self.indexes.clear()
            index = self.indexes[digest] = self._recorder.intern(verb, *details, text, digest, self._members)
        return index

    def enter(self, call: CollectiveCall, digest: int) -> None:
        """Record that this rank has entered a call."""
        if not (self._slot or call.is_started):
            index = self.indexes.get(digest) or self.index(digest, call.verb, call.text, self.signature.details)
            self._slot = self._recorder.enter(self.communicator, call.number, index, FRAMES)

    def take_noted_digest(self, noted: int) -> int:
        """Return the hash of all notes, chained with `noted` if that is not 0; clear the notes."""
        digest = chained(self.noted, noted) if noted else self.noted
        keep_notes(digest, self._notes, noted)
        self.noted, self._notes = 0, []
        return digest

    def take_notes(self, call: CollectiveCall) -> None:
        """Move the notes to a call."""
        if self._notes:
            call.noted, call.notes = self.noted, tuple(self._notes)
            self.noted, self._notes = 0, []

    def agree(
        self, call: CollectiveCall, error: Exception | None = None, facts: Sequence[int] = (0, 0)
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Wait until all ranks have arrived, check that they make the same call, and exchange two numbers. A collective call.

        Returns
        -------
        ndarray
            int64, (ranks, 2): the facts of every rank; valid until the next call.

        Raises
        ------
        DeadlineExceededError
            If a rank does not arrive in time.
        AgreementError
            On every rank, if the calls differ; a rank that passes an `error` raises that error.
        """
        text, facts = call.text, (*facts, bool(call.ends))
        self.signature = Signature(call.arguments)
        self.enter(call, self.signature.digest ^ call.noted)
        if self._watcher is not None and call.ends:
            self._watcher.limit = call.ends, lambda: self._blocked_in_mpi(call)
        # also on a rank alone on its node: messages of the call carry it
        self._present.digest = digest_of(text if error is None else f"{text} {error!r}") | COMPARED
        if self._window is not None:
            try:
                self._drive(call, self._window.barrier_with(facts), call.rest_seconds)
                found = np.array(self._window.facts())
                # if any rank has a deadline, all learn together whether all have arrived in time
                if self._one_node and error is None and not found[:, 2].any():
                    return found[:, :2]
                must_compare_texts = False
            except CallsDifferError as differ:
                if not differ.all_compare:
                    raise self._failed(call, self._mismatch(text)) from None
                must_compare_texts = self._one_node
            if must_compare_texts:
                self._agreement.raise_on_all(text, error, call.number, self._completion(call))
        found = self._agreement.check(text, error, self._completion(call), facts, call.number)
        # MPI's blocking and nonblocking collectives do not match: if one rank has a deadline, all use nonblocking ones
        self._any_deadline = bool(found[:, 2].any())
        return found[:, :2]

    def refuse(self, call: CollectiveCall, error: Exception) -> NoReturn:
        """Raise the error of a call that this rank cannot make; ranks that make it see it in this rank's record."""
        text = f"{call.text}, which failed: {type(error).__name__}: {error}"
        self.enter(replace(call, describe=lambda: text, notes=()), digest_of(text))
        raise error

    def begin(self, call: CollectiveCall, signature: Signature) -> None:
        """Make a call the current one. The signature describes it without its notes."""
        self.signature = signature
        self._present.digest = digest = signature.digest ^ call.noted
        self.enter(call, digest)
        self._present.must_poll = bool(call.seconds) or self._any_deadline or call.is_started
        self._present.count()

    def run(self, call: CollectiveCall, steps: Steps) -> None:
        """Run the steps of a call within the rest of its time. After a failure no other collective can be made.

        Raises
        ------
        DeadlineExceededError
            If the deadline passes.
        AgreementError
            If ranks turn out to be in different calls.
        """
        self._drive(call, steps, call.rest_seconds)

    def drive_current(self, steps: Steps) -> None:
        """Run steps of a call on a fast path, under the communicator's deadline."""
        seconds = self._options.timeout_seconds or 0.0
        self._ends = time.monotonic() + seconds if seconds else 0.0
        drive(steps, self._describe_current, seconds, self._overdue, None, self._check_progress)

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to raise for what a call on a fast path raised; no other collective can be made."""
        error = self._diagnosed(error, self.signature.text_after(self._present.digest ^ self.signature.digest))
        self._fail_and_notify("all_reduce", error)
        return error

    def overdue(self, call: CollectiveCall) -> DeadlineExceededError:
        """Notify all ranks that this one gives up the call, and return the error that names the ranks that do not answer."""
        return self._deadline_barrier.overdue(str(call), call.seconds, self._missing())

    def give_up(self) -> None:
        """Notify all ranks that this one will not make any further collective."""
        self._deadline_barrier.give_up()

    def fail(self, verb: str, error: BaseException) -> None:
        """Refuse all further collectives: one has failed here, and ranks may be out of step."""
        self._cause, why = error, f"did not end ({type(error).__name__}), and ranks may be out of step"
        self.refusal = self._failure = f"an earlier {verb} {why}; make a new strategy"
        if self._watcher is not None:
            self._watcher.dismiss(self.communicator)
        leave_to_peers(self._memory)

    def _fail_and_notify(self, verb: str, error: BaseException) -> None:
        """Refuse all further collectives, and notify the other ranks of an error that they do not find by themselves."""
        self.fail(verb, error)
        if self._watcher is not None and not isinstance(error, CollectiveError):
            where = f"rank {self._rank} has left collective {self.number}, {self.signature.text}"
            raised = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            why = UnavailableError(f"{where}, where it raised {raised}. Ranks may be out of step; make a new strategy on all")
            self._watcher.post_failure((self.communicator, self.number), why)

    def refuse_from_now_on(self, why: str) -> None:
        """Refuse all further collectives."""
        self.refusal = self._failure = why
        self._cause = self._last = None

    def refuse_in_child(self) -> None:
        """Refuse all collectives in a process that was forked from a rank."""
        who = f"process {os.getpid()} was forked from rank {self._rank}, and is not a rank itself"
        self.refuse_from_now_on(f"{who}; compute there, and let the parent communicate")
        self.lock = threading.Lock()

    def confirm_at_exit(self) -> None:
        """Compare the calls that have not been compared yet, at the end of the program. A collective call if there are any."""
        if self._failure or not self._present.unconfirmed:
            return
        try:
            with self:
                self._present.settle()
        except CollectiveError as error:
            abort.end(error)

    def _confirm(self, history: int) -> None:
        """Compare the calls that MPI has reduced since the last comparison; name the first that differs. A collective call."""
        call = CollectiveCall(self.number, "all_reduce", lambda: "the calls that MPI combined last", self._options)
        found = self._agreement.check(call.text, None, self._completion(call), (history, 0, 0))
        if (found[:, 0] == history).all():
            return
        records = RankFile(self._recorder.memory).records()
        mine = {record.number: record.call.text for record in records if record.communicator == self.communicator}
        recent = sorted(mine)[-MOST_UNCONFIRMED - 1 :]
        sent = self._agreement.exchange([(number, mine[number]) for number in recent], self._completion(call))
        every: list[dict[int, str]] = [dict(pairs) for pairs in sent]
        number = next((n for n in recent if len({texts.get(n) for texts in every}) > 1), self.number)
        error = calls_differ(number, {rank: texts.get(number, "another") for rank, texts in enumerate(every)})
        raise self._failed(call, error)

    def _completion(self, call: CollectiveCall) -> Completion:
        """Return what completes an exchange of all ranks before the deadline of a call, or fails the communicator."""
        steps, absent = self._deadline_barrier.steps, self._absent
        return lambda enter: self._drive(call, steps(enter, lambda: str(call), call.seconds, absent), is_arriving=True)

    def _drive(self, call: CollectiveCall, steps: Steps, timeout_seconds: float = 0.0, is_arriving: bool = False) -> None:
        """Run steps; those of a deadline barrier (`is_arriving`) watch the deadline and the peers' messages themselves."""
        back = back_off if call.is_started else None
        try:
            if is_arriving:
                drive(steps, call.describe, back_off=back, check=self._raise_verdict)
            else:
                self._ends = call.ends
                drive(steps, call.describe, timeout_seconds, lambda: self.overdue(call), back, self._check_progress)
        except BaseException as error:
            if isinstance(error, CallsDifferError) and self._present.digest & COMPARED:
                raise
            understood = self._diagnosed(error, call.text)
            self._fail_and_notify(call.verb, understood)
            if understood is error:
                raise
            raise understood from None

    def _check_progress(self) -> None:
        """Raise if the current call is known not to end."""
        self._raise_verdict()
        # a rank whose own deadline is about to pass names the missing ranks itself
        is_last_moment = self._ends and self._ends - time.monotonic() < LONGEST_GRACE_SECONDS
        if not is_last_moment and self._deadline_barrier.is_given_up():
            raise self._deadline_barrier.given_up(self._describe_current(), self._missing())

    def _raise_verdict(self) -> None:
        if self._watcher is not None:
            self._watcher.raise_verdict()

    def _describe_current(self) -> str:
        return f"collective {self.number}, {self.signature.text}"

    def _overdue(self) -> DeadlineExceededError:
        return self._deadline_barrier.overdue(self._describe_current(), self._options.timeout_seconds or 0.0, self._missing())

    def _blocked_in_mpi(self, call: CollectiveCall) -> DeadlineExceededError:
        """Return the error of a call whose deadline has passed while this rank is blocked in MPI."""
        return DeadlineExceededError(
            f"rank {self._rank}: {call} did not end within {call.seconds:g} s: this rank waits in a call of MPI that does not "
            "return, for ranks that have stopped or ended"
        )

    def _missing(self) -> list[int]:
        """Return the ranks that have not arrived, as far as this node's memory and the records of all ranks show."""
        missing = set() if self._window is None else set(self._window.missing())
        return sorted(missing | self._absent() if missing and not self._one_node else missing)

    def _absent(self) -> set[int]:
        """Return the ranks that are known not to have entered the current call."""
        if self._watcher is None:
            return set()
        key = self.communicator, self.number
        states = self._watcher.compare(_ANSWER_SECONDS, self._job_ranks)
        return {rank for rank, state in enumerate(states) if state.state != "unknown" and state.at(key) is None}

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
        if self._watcher is not None:
            self._watcher.post_failure((self.communicator, self.number), error)
        return error

    def _texts(self, text: str) -> dict[int, str]:
        """Return the description of each rank's current call; `text` is this rank's."""
        texts = {self._rank: text}
        for rank, state in enumerate([] if self._watcher is None else self._watcher.compare(ranks=self._job_ranks)):
            found = state.at((self.communicator, self.number))
            texts.setdefault(rank, found.text if found else f"({state.doing()})")
        return texts

    def _failed(self, call: CollectiveCall, error: CollectiveError) -> CollectiveError:
        self.fail(call.verb, error)
        return error

    def _require_same_thread(self) -> None:
        if self._last is not None and self._last_thread != threading.get_ident() and not self._last.has_ended():
            raise self._refused(
                "another thread has started a collective that has not ended: make all collectives of a strategy on one thread"
            )

    def _refused(self, why: str) -> UnavailableError:
        return UnavailableError(f"rank {self._rank}: no further collective can be made: {why}")


@cache
def _still_running(verb: str) -> str:
    return f"an earlier {verb} is still under way: wait for it first"
