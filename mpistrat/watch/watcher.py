"""Watcher: a thread that reports when the program waits long in a collective, and detects deadlocks.

It surveys the states of all ranks: from files on this host, and by messages from one rank of each other host.

Invariant: no MPI call here blocks, and none is made before MPI runs or while it is being finalized.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any

from mpistrat import ending, settings, timeline
from mpistrat.errors import AgreementError, CollectiveError
from mpistrat.launch import abort, environment
from mpistrat.lazy import MPI
from mpistrat.logger import logger, stderr, warn_once
from mpistrat.text import ranks_by
from mpistrat.timeline import Timeline, TimelineEvent
from mpistrat.watch.record import Key, RankFile, RecordedCall, State, files_of, seconds_since
from mpistrat.watch.recorder import FlightRecorder, collection_paused, innermost, recorder
from mpistrat.watch.states import Neighbours, RankState, decode, encode, end_report, look, stall_report
from mpistrat.watch.verdict import Finding, Notice, judge, waits_for

Limits = dict[object, tuple[float, Callable[[], CollectiveError]]]
"""Deadlines of calls, by whose they are, and their errors."""
Message = dict[str, Any]
"""A message between watchers: a JSON object."""

WAKE_SECONDS = 0.25
# a rank that has waited this long surveys the others
PATIENCE_SECONDS = 1.0
LONGEST_BETWEEN_LOOKS_SECONDS = 2.0
# hosts survey one after another: a host that was just asked by an earlier one need not ask all others too
STAGGER_SECONDS = 0.01
ANSWER_SECONDS = 0.9
# how often to look for answers while some are missing
POLL_SECONDS = 0.01
# a program that has not raised the verdict, or its deadline's error, after this long is stuck in a call in C
TAKE_SECONDS = 3.0

_TAG = 1
_PREFIX = "verdict-"  # of the names of notices, in the folder of the job
_MOST_UNTAKEN = 4  # messages to one rank that it has not received yet
_ON_ITS_WAY_SECONDS = 1.0
# seconds after which more ranks of a host that does not answer are asked: one first, then two, four, …
_NEXT_SECONDS = 0.3

# the time that other ranks have to print their tracebacks
OTHERS_SECONDS = 1.0
LONGEST_GOODBYE_SECONDS = 5.0

_lock = threading.Lock()
_watcher: Watcher | None = None


class Survey:
    """One round of questions: made by whoever wants to know, begun, taken further and answered by the watching thread."""

    _numbers = iter(range(1, 2**62))

    def __init__(self, wanted: Collection[Key], seconds: float) -> None:
        self.answer = SimpleQueue[list[RankState]]()
        self.keys, self._seconds = {*wanted}, seconds
        self._found: dict[int, RankState] = {}
        self._asked = 0

    def begin(self, size: int, neighbours: Neighbours, messages: HostMessages | None) -> None:
        """Look at the ranks of this host."""
        self._size, self._messages, self.number = size, messages, next(self._numbers)
        found, self.keys = neighbours.states(self.keys, messages.own if messages else range(size))
        self._add(found)
        self._silent = list(messages.others) if messages else []
        self._ask_at = time.monotonic()
        self._ends = self._ask_at + self._seconds
        self._question: Message = {"ask": self.number, "wanted": sorted(self.keys)}

    def is_done(self) -> bool:
        """Return whether all hosts have answered or the time is up; ask more ranks until then."""
        now = time.monotonic()
        self._silent = [ranks for ranks in self._silent if not self._found.keys() & ranks]
        if self._silent and self._messages is not None and now >= self._ask_at:
            first, self._asked = self._asked, 2 * self._asked + 1
            self._ask_at = now + _NEXT_SECONDS
            for ranks in self._silent:
                self._messages.send(self._question, ranks[first : self._asked])
        return not self._silent or now > self._ends

    def take(self, answer: Message) -> None:
        """Add the answer of another host."""
        if answer["answer"] == self.number:
            self._add(decode(answer["states"]))

    def states(self) -> list[RankState]:
        """Return the state of each rank, in rank order."""
        return [self._found.get(rank) or RankState(rank) for rank in range(self._size)]

    def _add(self, states: Sequence[RankState]) -> None:
        self._found |= {state.rank: state for state in states if state.rank < self._size}


class HostMessages:
    """Messages between the watching threads of several hosts.

    `comm` has all ranks of the job, and is used for these messages only; `places` is for each rank the identity of its record
    folder: ranks that share one need no messages. Nothing here waits. A stopped rank receives no messages, so the number of
    unreceived ones to each rank is limited.
    """

    def __init__(self, comm: MPI.Intracomm, places: Sequence[str]) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        nodes = ranks_by(enumerate(places))
        self.place = [*nodes].index(places[self.rank])  # of this host, in the order of their lowest ranks
        self.own = nodes.pop(places[self.rank])  # the ranks of this host
        self.others = list(nodes.values())  # those of each other host
        self.elsewhere = [rank for ranks in self.others for rank in ranks]
        self._untaken: dict[int, list[tuple[MPI.Request, bytes]]] = {}
        self._arriving: list[tuple[MPI.Request, bytearray, int]] = []
        self._sent = -math.inf

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        """Send a message to some ranks, except to those that do not receive."""
        data = json.dumps(message).encode()
        for rank in ranks:
            left = [(request, kept) for request, kept in self._untaken.get(rank, []) if not request.Test()]
            if len(left) < _MOST_UNTAKEN:
                self._sent = time.monotonic()
                left.append((self.comm.Isend([data, MPI.BYTE], rank, _TAG), data))
            self._untaken[rank] = left

    def is_sending(self) -> bool:
        """Return whether a recent message is still being sent: a long one needs progress at both ends."""
        if time.monotonic() > self._sent + _ON_ITS_WAY_SECONDS:
            return False
        return any(not request.Test() for kept in self._untaken.values() for request, _ in kept)

    def received(self) -> Iterator[tuple[int, Message]]:
        """Yield the messages that have arrived, with their senders."""
        status = MPI.Status()
        while (message := self.comm.Improbe(MPI.ANY_SOURCE, _TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            self._arriving.append((message.Irecv([data, MPI.BYTE]), data, status.Get_source()))
        arriving, self._arriving = self._arriving, []
        for request, data, source in arriving:
            if request.Test():
                yield source, json.loads(bytes(data))
            else:
                self._arriving.append((request, data, source))


class Notices:
    """The notices of a job on one host, in its folder; if that does not exist, they stay in this process."""

    def __init__(self, job: Path) -> None:
        self._job = job
        self._own: list[Notice] = []
        self._ignored: set[str] = set()
        self._refused: set[str] = set()
        self._failed: set[int] = set()

    def post(self, notice: Notice) -> None:
        """Post a notice for the ranks of this host."""
        self._own.append(notice)
        path = self._job / f"{_PREFIX}{notice.name}"
        new = path.with_name(f".{path.name}-{os.getpid()}")
        with suppress(OSError):
            new.write_text(json.dumps(asdict(notice)))
            with suppress(FileExistsError):
                os.link(new, path)
            new.unlink()

    def first(self, inside: Collection[Key]) -> Notice | None:
        """Return the first notice for a rank inside these collectives that is not ignored; None if there is none."""
        return next((notice for notice in self._all() if self._is_for_all(notice) or notice.concerns(inside)), None)

    def _is_for_all(self, notice: Notice) -> bool:
        return notice.is_for_all and notice.name not in self._refused

    def refuse(self, communicator: int, number: int) -> None:
        """Heed a notice about a collective that this rank has refused only inside it: the rank has raised why, and goes on."""
        self._refused.add(f"{communicator}-{number}")

    def dismiss(self, communicator: int) -> None:
        """Ignore all notices, also later ones, about a communicator that has failed on this rank."""
        self._failed.add(communicator)

    def ignore(self) -> None:
        """Ignore the notices for all that were posted so far; others are about a communicator that may still be used."""
        self._ignored |= {notice.name for notice in self._all() if self._is_for_all(notice)}

    def _all(self) -> Iterator[Notice]:
        for path in files_of(self._job, _PREFIX):
            if self._counts(path.name.removeprefix(_PREFIX)):
                with suppress(OSError, ValueError, TypeError):
                    yield Notice(**json.loads(path.read_text()))
        yield from (notice for notice in self._own if self._counts(notice.name))

    def _counts(self, name: str) -> bool:
        return name not in self._ignored and int(name.partition("-")[0]) not in self._failed


class Watcher:
    """The watching thread of this process. One per process, in jobs of several ranks: see `start`."""

    def __init__(self, size: int) -> None:
        # the error of a deadlock or mismatch that is certain: a program that waits in a collective, or enters one, raises it
        self.verdict: CollectiveError | None = None
        self._verdict_on: Key | None = None  # the only collective that it is raised in; None if in any
        # for each communicator the deadline of its current call, on the clock of `time.monotonic`, and its error, which the
        # program raises itself; if it cannot, because it is in a call in C, the watcher prints it and ends the job
        self.limits: Limits = {}
        self._recorder: FlightRecorder = recorder()
        self._own = RankFile(self._recorder.memory)
        self._size = size
        timeline.write_at_exit_as(self._own.rank)
        job = self._recorder.path.parent if self._recorder.path else Path(os.devnull)
        self._neighbours, self._notices = Neighbours(job, self._own), Notices(job)
        self._messages: HostMessages | None = None
        self._wants_trace = self._has_failed_rank = False
        self._main = threading.main_thread().ident
        # what this thread is woken for: an interrupt of the program in a `threading.Event` would leave that locked
        self._told: SimpleQueue[Survey | Notice | None] = SimpleQueue()
        self._stopping = False
        self._survey: Survey | None = None
        self._surveyed = -math.inf  # when another host, of lower ranks, last looked around
        self._stagger_seconds = 0.0
        self._asked: deque[Survey] = deque()
        self._wanted: set[Key] = set()
        self._next_look = 0.0
        self._next_report = self._patience = settings.STALL_SECONDS.read_or_default()
        self._waiting: RecordedCall | None = None
        self._suspicion: Finding | None = None
        self._judged: tuple[float, RecordedCall] | None = None
        self._thread = threading.Thread(target=self._run, name="mpistrat watcher", daemon=True)
        self._thread.start()
        ending.at(ending.Stage.ABORT, lambda: self._recorder.note(state=State.FAILED))

    def raise_verdict(self) -> None:
        verdict = self.verdict  # other threads may take it back meanwhile
        if verdict is None:
            return
        if self._verdict_on is not None and self._verdict_on not in self._inside():
            self.verdict = None  # this rank has raised another error for it, and has gone on
            return
        raise type(verdict)(*verdict.args)

    def _inside(self) -> set[Key]:
        return {call.key for call in self._own.inside()}

    def begin(self) -> None:
        """Ignore earlier disagreements: a new strategy is being created."""
        self._notices.ignore()
        self._judged = None
        self.verdict = None

    def join(self, comm: MPI.Intracomm) -> None:
        """Exchange messages with the other hosts from now on, on a communicator of all ranks. A collective call, made once."""
        own = self._recorder
        own.note(rank=comm.Get_rank(), size=comm.Get_size())
        self._size = comm.Get_size()
        if abort.survives_losses(os.environ):
            return  # messages to all, and the barrier at the end, fail with the first rank that is lost
        place = ""
        if own.path is not None:
            found = own.path.parent.stat()
            place = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {found.st_dev} {found.st_ino}"
        joined = comm.allgather((place or f"rank {comm.Get_rank()}", bool(settings.TIMELINE.read())))
        messages = HostMessages(comm, [place for place, _ in joined])
        self._messages = messages
        self._stagger_seconds = min(messages.place * STAGGER_SECONDS, LONGEST_BETWEEN_LOOKS_SECONDS)
        self._wants_trace = joined[0][1]  # rank 0 writes it, and asks all
        if self._wants_trace:
            timeline.write_at_exit_as(None)
        ending.watch_finalize()

    @property
    def has_joined(self) -> bool:
        return self._messages is not None

    def compare(self, timeout_seconds: float = 2.0, ranks: Sequence[int] | None = None) -> list[RankState]:
        """Ask all ranks for their states, and return those of `ranks` of the job, or of all, in rank order."""
        own = self._own.last()
        survey = Survey({own.key} if own else (), timeout_seconds)
        self._told.put(survey)
        try:
            states = survey.answer.get(timeout=timeout_seconds + 1.0)
        except Empty:
            states = [RankState(rank) for rank in range(self._size)]
        return states if ranks is None else [states[rank] for rank in ranks]

    def post_failure(self, key: Key, error: CollectiveError) -> None:
        """Make the other ranks in a collective that has failed here, or in a later one of its communicator, raise an error."""
        self._told.put(Notice(*key, str(error), is_mismatch=isinstance(error, AgreementError), is_for_all=False))

    def refuse(self, communicator: int, number: int) -> None:
        """Have this rank, which has raised why it cannot make a collective, not raise elsewhere that others wait in it."""
        self._notices.refuse(communicator, number)

    def dismiss(self, communicator: int) -> None:
        """Ignore from now on what is found about a communicator that has failed here."""
        self._notices.dismiss(communicator)
        self.verdict = None

    def end(self) -> None:
        """Record that this program has ended, wait until all have, and stop; then MPI can be finalized."""
        if self._stopping:
            return
        has_failed = abort.ending_code() != 0
        self._recorder.note(state=State.FAILED if has_failed else State.ENDED)
        messages = self._live_messages()
        if messages is not None and not has_failed:  # a failed rank ends the job at once, with its own exit code
            all_have_ended = self._wait_for_all(messages.comm)
            if all_have_ended and self._wants_trace:
                gathered = messages.comm.gather(_own_timeline(self._own))
                if gathered is not None:  # on rank 0
                    timeline.write_trace(dict(enumerate(gathered)))
            if all_have_ended:
                ending.run(ending.Stage.FREE, given=[lambda yes: all(messages.comm.allgather(yes))])
        self._stopping = True
        self._told.put(None)
        self._thread.join(LONGEST_GOODBYE_SECONDS)
        if messages is not None:
            deque(messages.received(), 0)  # receive what has arrived, so that MPI is finalized without pending messages
        if has_failed and messages is not None:
            messages.send({"failed": self._own.rank}, messages.elsewhere)

    def _wait_for_all(self, comm: MPI.Intracomm) -> bool:
        """Wait until all programs have ended; return False if one has failed instead."""
        request = comm.Ibarrier()
        began, pause, patience, look = time.monotonic(), 0.0001, self._patience or math.inf, WAKE_SECONDS
        while not request.Test():
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
            waited = time.monotonic() - began
            if waited > look:
                look = waited + WAKE_SECONDS
                if self._has_failed_rank or any(file.state is State.FAILED for file in self._neighbours.files()):
                    return False  # the failed rank is in MPI_Finalize, and waits for this one
            if waited > patience:
                patience *= 2
                states = self.compare(ANSWER_SECONDS)
                is_lowest = not any(state.state == "ended" for state in states[: self._own.rank])
                if is_lowest and any(state.state != "ended" for state in states):
                    logger.warning(end_report(states[self._own.rank], waited, states))
        return True

    def _run(self) -> None:
        """Watch; an error of the watcher must not end a job."""
        try:
            self._watch()
        except Exception:
            if not self._stopping:
                logger.exception(f"rank {self._own.rank}: its watching thread has failed; hangs are no longer reported:")

    def _watch(self) -> None:
        is_busy = False
        while not self._stopping:
            if not is_busy:
                self._note_look()
            self._step()
            is_busy = self._survey is not None or (self._messages is not None and self._messages.is_sending())
            self._wait(POLL_SECONDS if is_busy else WAKE_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Wait for so long, or until other threads ask for something; take that."""
        with suppress(Empty):
            told = self._told.get(timeout=seconds)
            while True:
                if isinstance(told, Notice):
                    self._post(told)
                elif told is not None:
                    self._asked.append(told)
                told = self._told.get_nowait()

    def _note_look(self) -> None:
        """Record that this thread is awake, and where the program is."""
        with collection_paused():
            self._recorder.note_look(innermost(self._program()))

    def _program(self) -> FrameType | None:
        """Return the frame of the main thread."""
        return sys._current_frames().get(self._main or 0)

    def _step(self) -> None:
        self._listen()
        self._take_notices()
        inside = self._own.inside()
        waiting = next((record for record in inside if not record.is_started), inside[0] if inside else None)
        self._follow(waiting)
        if self._survey is not None:
            if self._survey.is_done():
                survey, self._survey = self._survey, None
                self._conclude(survey, waiting)
        elif self._asked:
            self._begin(self._asked.popleft())
        elif waiting is not None and time.monotonic() >= self._next_look:
            self._look(waiting)

    def _begin(self, survey: Survey) -> None:
        self._survey = survey
        survey.begin(self._size, self._neighbours, self._live_messages())

    def _follow(self, waiting: RecordedCall | None) -> None:
        """Update what this rank waits in; end the job if the program does not raise a verdict or deadline."""
        before, self._waiting = self._waiting, waiting
        if waiting is None or before is None or waiting.entered != before.entered:
            since = waiting.entered / 1e9 if waiting else time.monotonic()
            self._next_look = since + PATIENCE_SECONDS + self._stagger_seconds
            self._next_report = self._patience
            self._suspicion, self._wanted = None, set()
        for ends, error in list(self.limits.values()):
            if waiting is not None and time.monotonic() > ends + TAKE_SECONDS:
                self.limits.clear()
                _end_job(error(), self._program(), self._own)
        if self.verdict is None or waiting is None or waiting.is_started or self._verdict_on not in (None, waiting.key):
            self._judged = None
        elif self._judged is None or self._judged[1].entered != waiting.entered:
            self._judged = time.monotonic(), waiting
        elif time.monotonic() > self._judged[0] + TAKE_SECONDS:
            self._judged = math.inf, waiting
            _end_job(self.verdict, self._program(), self._own)

    def _look(self, waiting: RecordedCall) -> None:
        """Begin a survey, if this is the rank of its host that does."""
        waited = seconds_since(waiting.entered)
        self._next_look = time.monotonic() + min(max(WAKE_SECONDS, waited / 8), LONGEST_BETWEEN_LOOKS_SECONDS)
        if self._patience and waited < self._next_report:
            self._next_look = min(self._next_look, time.monotonic() + self._next_report - waited)
        # the lowest waiting rank of a host surveys for all of them
        is_lowest = not any(_reports(look(file)) for file in self._neighbours.files() if file.rank < self._own.rank)
        if is_lowest and time.monotonic() > self._surveyed + 2 * LONGEST_BETWEEN_LOOKS_SECONDS:
            self._begin(Survey({*self._wanted, waiting.key}, ANSWER_SECONDS))
        elif self._patience and waited >= self._next_report:
            self._put_off_report(waited)

    def _live_messages(self) -> HostMessages | None:
        return self._messages if self._messages is not None and _mpi_runs() else None

    def _conclude(self, survey: Survey, waiting: RecordedCall | None) -> None:
        states = survey.states()
        survey.answer.put(states)
        known, self._wanted = survey.keys, {call.key for state in states if (call := state.waits_in) is not None}
        if waiting is None or seconds_since(waiting.entered) < PATIENCE_SECONDS:
            return
        finding = judge(states, known)
        if finding is not None and self._suspicion is not None and finding.fingerprint == self._suspicion.fingerprint:
            if self.verdict is None:
                self._post(finding.notice)
        elif finding is not None:
            self._next_look = time.monotonic() + WAKE_SECONDS
        self._suspicion = finding
        waited = seconds_since(waiting.entered)
        if self._patience and waited >= self._next_report:
            self._put_off_report(waited)
            # ranks of other hosts may have waited as long
            if not any(_reports(state) for state in states[: self._own.rank]):
                for state in _to_report(self._own.rank, states, known, self._patience):
                    logger.warning(stall_report(state, states))

    def _put_off_report(self, waited: float) -> None:
        while self._next_report <= waited:
            self._next_report *= 2

    def _post(self, notice: Notice) -> None:
        self._notices.post(notice)
        messages = self._live_messages()
        if messages is not None:
            messages.send({"notice": asdict(notice)}, messages.elsewhere)
        self._take_notices()

    def _take_notices(self) -> None:
        if self._verdict_on is not None and self._verdict_on not in self._inside():
            self.verdict = self._verdict_on = None
        if self.verdict is None:
            inside = self._inside()
            notice = self._notices.first(inside)
            if notice is not None:
                self._verdict_on = None if notice.is_for_all else notice.concerns(inside)
                self.verdict = notice.error()

    def _listen(self) -> None:
        messages = self._live_messages()
        if messages is None:
            return
        for source, message in messages.received():
            if "ask" in message:
                if source < self._own.rank and self._waiting is not None and [*self._waiting.key] in message["wanted"]:
                    self._surveyed = time.monotonic()
                messages.send(self._answer(message), [source])
            elif "answer" in message:
                if self._survey is not None:
                    self._survey.take(message)
            elif "failed" in message:
                self._has_failed_rank = True
            elif "notice" in message:
                self._notices.post(Notice(**message["notice"]))

    def _answer(self, question: Message) -> Message:
        expected = self._messages.own if self._messages is not None else ()
        states, _ = self._neighbours.states([(first, second) for first, second in question["wanted"]], expected)
        return {"answer": question["ask"], "states": encode(states)}


def watcher() -> Watcher | None:
    """Return the watcher of this process; None if it is not one of several ranks."""
    return _watcher


def introduce(node: str) -> None:
    """Record the name of this rank's node; rank 0 warns once about variables that look like misspelt settings."""
    mine = recorder()
    mine.note(node=node)
    if RankFile(mine.memory).rank == 0:
        for name, near in settings.misspelt().items():
            if near:  # others may belong to the program
                warn_once(name, settings.misspelt_text(name, near))


def start(size: int | None = None) -> Watcher | None:
    """Start the watcher of this process in a job of several ranks, `size` or as many as the launcher says, and return it."""
    global _watcher
    with _lock:
        if size is None:
            _, size = environment.promised_place()
        if _watcher is None and size > 1:
            _watcher = Watcher(size)
            os.register_at_fork(after_in_child=_after_fork)
        return _watcher


def _end() -> None:
    if _watcher is not None:
        _watcher.end()


ending.at(ending.Stage.MEET, _end)


def _after_fork() -> None:
    """Forget the watcher: a forked child has no watching thread, and no place in the job."""
    global _watcher
    _watcher = None


def _reports(state: RankState) -> bool:
    """Return whether a rank waits, and its watching thread can report it."""
    call = state.waits_in if state.state == "in" and not state.is_silent else None
    # ranks that entered at nearly the same time must agree on which of them it is
    return call is not None and call.entered_seconds_ago > PATIENCE_SECONDS / 2


def _to_report(own: int, states: Sequence[RankState], looked_up: Collection[Key], seconds: float) -> list[RankState]:
    """Return this rank, and the first one of each other collective that lasts half as long, and misses a rank in none."""
    misses, found = waits_for(states, looked_up), {call.key: states[own] for call in [states[own].waits_in] if call}
    for rank, others in misses.items():
        call = states[rank].waits_in
        if call and call.entered_seconds_ago >= seconds / 2 and any(states[other].waits_in is None for other in others):
            found.setdefault(call.key, states[rank])
    return [*found.values()]


def _end_job(error: CollectiveError, frame: FrameType | None, own: RankFile) -> None:
    """End the job, unless MPISTRAT_ABORT is off, where the program is stuck in a call in C, with an error and its traceback."""
    label = f"rank {own.rank} on {own.text('host')}"
    text = abort.format_exception(error.with_traceback(_traceback_of(frame)), label)
    if settings.ABORT.read_or_default():
        abort.end_job(MPI.COMM_WORLD, 1, text, seconds=OTHERS_SECONDS)
    else:
        stderr.say(text)


def _traceback_of(frame: FrameType | None) -> TracebackType | None:
    """Return the traceback of an uncaught exception raised in a frame."""
    trace: TracebackType | None = None
    while frame is not None:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return trace


def _own_timeline(own: RankFile) -> Timeline:
    """Return what this rank has recorded, with its last collectives as a row; both clocks are CLOCK_MONOTONIC."""
    whole = timeline.merged()
    calls = [
        TimelineEvent(call.text, "collectives", begin, begin + call.entered_seconds_ago - call.left_seconds_ago, call.nbytes)
        for call in reversed(own.calls())
        if call.left_seconds_ago is not None and not call.is_started and (begin := call.entered / 1e9)
    ]
    whole.events = [*calls, *whole.events]
    return whole


def _mpi_runs() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
