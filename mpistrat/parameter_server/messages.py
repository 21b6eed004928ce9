"""Messages between the tasks of a job with parameter servers, and how they are sent, received and waited for.

A message is a header of its kind and a payload. A small payload is sent with its header; a larger one follows in messages of
its own, from where it lies in memory to where it belongs.

Invariant: nothing here blocks in MPI. What waits for another rank polls, looks at its deadline, and says after a while what
for; where the job survives the loss of ranks, it ends with an UnavailableError if that rank is lost. Whoever gives up requests
that have not completed leaves their memory to the peers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat import settings
from mpistrat.errors import DeadlineExceededError, UnavailableError
from mpistrat.groups.agreement import pause
from mpistrat.groups.group import keep_alive_for_peers
from mpistrat.launch import survival
from mpistrat.launch.openmpi import num_cores, yields_when_idle
from mpistrat.logger import logger
from mpistrat.parameter_server.tasks import TaskGroup
from mpistrat.watch.recorder import encoded_activity, recorder
from mpistrat.watch.stall_report import others_report
from mpistrat.watch.watcher import watcher

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "REPLY",
    "REQUEST",
    "RESULT",
    "SCATTERS",
    "WRITES",
    "Activity",
    "Answer",
    "Buffer",
    "Cancel",
    "Cancelled",
    "Channel",
    "Create",
    "Define",
    "Flush",
    "ForgetFunction",
    "ForgetResource",
    "ForgetVariables",
    "Forgotten",
    "Free",
    "Message",
    "Read",
    "ReadRows",
    "Received",
    "Receiver",
    "Request",
    "Result",
    "Run",
    "Scatter",
    "Stop",
    "Stopped",
    "Update",
    "Write",
]

# tags: to a server or a worker; from a server, to whoever asked; from a worker, to the chief
REQUEST, REPLY, RESULT = 1, 2, 3
# the messages that follow a header have a tag that tells its number: what was given up is not taken for what comes later
_PAYLOAD, _TAGS, _NUMBERS_IN_TAGS = 16, 4, 4096

_INLINE_BYTES = 16 << 10
# a message below each transport's eager limit has come as a whole, and cannot stop half-way when its rank is lost
_INLINE_BYTES_WHERE_RANKS_ARE_LOST = 3 << 10
_POLLS = 100  # before the core is given away, where each rank has one of its own
_RECORDED_FROM_SECONDS = 0.01  # a wait that is shorter is not recorded
_NOTIFIED_WITHIN_SECONDS = 2.0  # a message may fail before the launcher has reported that its rank is gone

Buffer = Any
Request = Any  # MPI.Request, or _Refused


# To a server. The answer to a request has its number.


class Create(NamedTuple):
    """Keep a variable; the payload is its name, dtype and shape."""

    number: int
    variable: int


class Free(NamedTuple):
    """Keep a variable no longer."""

    variable: int


class Read(NamedTuple):
    """Send rows of a variable, without a header."""

    number: int
    variable: int
    start: int
    stop: int


class ReadRows(NamedTuple):
    """Send single rows, without a header; the payload is the numbers of variables, how many rows of each, and which."""

    number: int
    num_variables: int


class Write(NamedTuple):
    """Assign, add or subtract the payload; `method` is an index in `WRITES`."""

    number: int
    variable: int
    method: int
    start: int
    stop: int


class Scatter(NamedTuple):
    """Apply rows; the payload is their indices and the rows, `method` an index in `SCATTERS`."""

    number: int
    variable: int
    method: int
    num_rows: int


class Update(NamedTuple):
    """Call a function with a variable; the payload is its other arguments, and whether the result is wanted."""

    number: int
    variable: int
    function: int


class Flush(NamedTuple):
    """Send one byte when all that this rank has asked for before is done."""

    number: int


# To a server or a worker.


class Define(NamedTuple):
    """Keep a function, which the payload is."""

    function: int


class ForgetFunction(NamedTuple):
    """Keep a function no longer."""

    function: int


class Stop(NamedTuple):
    """End, after what has come before; what belongs to this epoch or an earlier one is cancelled."""

    epoch: int


# To a worker.


class Run(NamedTuple):
    """Run a function with the payload as arguments; keep what it returns, or send it."""

    call: int
    function: int
    epoch: int
    is_kept: bool


class Cancel(NamedTuple):
    """Do not run what belongs to this epoch or an earlier one."""

    epoch: int


class ForgetResource(NamedTuple):
    """Keep no longer what a call returned."""

    call: int


class ForgetVariables(NamedTuple):
    """Say when no variable of the payload is used any more."""

    batch: int


# Answers of a server or a worker.


class Answer(NamedTuple):
    """What an update returned, or its error."""

    number: int
    is_error: bool


class Result(NamedTuple):
    """What a function returned, or its error."""

    call: int
    is_error: bool


class Cancelled(NamedTuple):
    """A call was not run."""

    call: int


class Forgotten(NamedTuple):
    """No variable of a batch is used any more."""

    batch: int


class Stopped(NamedTuple):
    """The task has ended."""

    epoch: int


WRITES = ("assign", "assign_add", "assign_sub")
SCATTERS = ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div", "scatter_min", "scatter_max", "scatter_update")

Message: TypeAlias = tuple[int, ...]  # one of the classes above; its first field tells the tags of its payload
_KINDS: tuple[Any, ...] = (
    *(Create, Free, Read, ReadRows, Write, Scatter, Update, Flush, Define, ForgetFunction, Stop, Run, Cancel, ForgetResource),
    *(ForgetVariables, Answer, Result, Cancelled, Forgotten, Stopped),
)
# the kind, the bytes of the payload, and the fields
_HEADERS = tuple(Struct(f"=Bq{len(kind._fields)}q") for kind in _KINDS)
_PACKED = {kind: (index, header.pack) for index, (kind, header) in enumerate(zip(_KINDS, _HEADERS, strict=True))}
_HEADER_BYTES = max(header.size for header in _HEADERS)


class Received(NamedTuple):
    """A message that has arrived, from a rank; a payload that came with the header is valid until the next one is received."""

    source: int
    message: Any
    nbytes: int
    inline: memoryview | None


class Activity:
    """What this task does and waits for, recorded for `mpistrat doctor` and the stall reports of other ranks."""

    def __init__(self, task: str) -> None:
        self._task, self._text, self._recorder = task, "", recorder()

    def set(self, text: str) -> None:
        """Record what the task does; an empty text clears it."""
        self._text = text
        self._recorder.set_activity(_encoded(self._task, text))

    def wait_for(self, what: str) -> None:
        """Record what the task waits for, until `resume`."""
        text = f"{self._text}, waits for {what}" if self._text else f"waits for {what}"
        self._recorder.set_activity(_encoded(self._task, text))

    def resume(self) -> None:
        """Record that the task waits no longer."""
        self.set(self._text)


@lru_cache(256)
def _encoded(task: str, text: str) -> bytes:
    return encoded_activity(f"{task} {text}" if text else "")


class Channel:
    """Sends messages to the other tasks, and waits for what they send.

    Attributes
    ----------
    survives : bool
        Whether this job survives the loss of ranks.
    lost : frozenset of int
        The ranks that are known to be lost.
    inline_bytes : int
        The largest payload that is sent with its header.
    """

    def __init__(self, group: TaskGroup) -> None:
        assert group.comm is not None, "an evaluator takes part in no communication"
        self.group, self.comm = group, group.comm
        self.name = group.names[self.comm.Get_rank()]
        self.activity = Activity(self.name.partition(" (")[0])
        self.survives = survival.is_on(os.environ)
        self.inline_bytes = _INLINE_BYTES_WHERE_RANKS_ARE_LOST if self.survives else _INLINE_BYTES
        self.lost: frozenset[int] = frozenset()
        self._seconds = group.settings[settings.TIMEOUT_SECONDS]
        self._patience = group.settings[settings.STALL_SECONDS]
        self._most = group.settings[settings.MAX_MESSAGE_BYTES]
        is_crowded = self.comm.Get_size() > num_cores() or yields_when_idle(os.environ)
        self.polls = 0 if is_crowded else _POLLS

    def send(self, rank: int, tag: int, message: Message, *payload: Buffer) -> list[Request]:
        """Start to send a message and C-contiguous arrays or bytes, which stay as they are until the requests have ended."""
        nbytes = sum(map(_size, payload))
        kind, pack = _PACKED[type(message)]
        header = pack(kind, nbytes, *message)
        if nbytes <= self.inline_bytes:
            whole = b"".join((header, *map(_as_bytes, payload)))
            return self._started(self.comm.Isend, [(whole, rank, tag)])
        payload_tag = _payload_tag(tag, message)
        parts = [(chunk, rank, payload_tag) for buffer in payload for chunk in self._chunks(_as_bytes(buffer))]
        return self._started(self.comm.Isend, [(header, rank, tag), *parts])

    def start_receiving(self, buffer: Buffer, rank: int, tag: int) -> list[Request]:
        """Start to receive what `send_bare` sends."""
        return self._started(self.comm.Irecv, [(chunk, rank, tag) for chunk in self._chunks(_as_bytes(buffer))])

    def send_bare(self, buffer: Buffer, rank: int, tag: int) -> list[Request]:
        """Start to send an array without a header, to a rank that knows what it will be."""
        return self._started(self.comm.Isend, [(chunk, rank, tag) for chunk in self._chunks(_as_bytes(buffer))])

    def report_end(self) -> None:
        """Tell the chief that this task has ended, and wait until it has taken that, and all that was sent to it before."""
        kind, pack = _PACKED[Stopped]
        taken = self._started(self.comm.Issend, [(pack(kind, 0, 0), self.group.chief, RESULT)])
        self.wait(taken, lambda: "the chief, to take what this task has sent", has_deadline=False)

    def receive_payload(self, received: Received, tag: int, *targets: Buffer) -> None:
        """Receive the payload of a message into arrays that together have its size."""
        if received.inline is not None:
            start = 0
            for target in targets:
                view = _as_bytes(target)
                view[:] = received.inline[start : start + len(view)]
                start += len(view)
            return
        requests: list[Request] = []
        try:
            for target in targets:
                requests += self.start_receiving(target, received.source, _payload_tag(tag, received.message))
            self.wait(requests, lambda: f"the payload of a message from {self.group.names[received.source]}")
        except BaseException as error:
            if not isinstance(error, UnavailableError):
                keep_alive_for_peers(requests)
            raise

    def payload(self, received: Received, tag: int) -> bytes | bytearray | memoryview:
        """Return the payload of a message; where it is inline it is valid until the next one is received."""
        if received.inline is not None:
            return received.inline
        target = bytearray(received.nbytes)
        self.receive_payload(received, tag, target)
        return target

    def wait(self, requests: Sequence[Request], what: Callable[[], str], *, has_deadline: bool = True) -> None:
        """Wait for requests; where their rank is lost, raise an UnavailableError when all of them have ended."""
        lost: UnavailableError | None = None
        for request in requests:
            try:
                if not self.has_ended(request):
                    self.wait_until(partial(self.has_ended, request), what, has_deadline=has_deadline)
            except UnavailableError as error:
                lost = error
        if lost is not None:
            raise lost

    def wait_until(self, has_come: Callable[[], object], what: Callable[[], str], *, has_deadline: bool = True) -> None:
        """Wait until a condition holds, as `wait` does."""
        for _ in range(self.polls):
            if has_come():
                return
        began = time.monotonic()
        limit = self._seconds if has_deadline and self._seconds else float("inf")
        patience = self._patience or float("inf")
        is_recorded = False
        try:
            while not has_come():
                pause(began)
                waited = time.monotonic() - began
                if waited > _RECORDED_FROM_SECONDS and not is_recorded:
                    is_recorded = True
                    self.activity.wait_for(what())
                if waited > limit:
                    raise DeadlineExceededError(
                        f"{self.name}: waited {limit:g} s for {what()}; it may be busy with a long request, or have failed. "
                        "MPISTRAT_TIMEOUT_SECONDS sets how long to wait, 0 without a limit"
                    )
                if waited > patience:
                    patience *= 2
                    logger.warning(f"{self.name} has waited {waited:.0f} s for {what()}{self._meanwhile()}")
        finally:
            if is_recorded:
                self.activity.resume()

    def _meanwhile(self) -> str:
        """Return what the other ranks of the job do, on lines of their own."""
        watching = watcher()
        if watching is None:
            return ""
        states = watching.compare()
        return f"\n{others_report(self.group.job_rank, states)}"

    def left(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests that have not ended; those with a rank that is lost have."""
        return [request for request in requests if not self._is_over(request)]

    def check(self, rank: int) -> None:
        """Check that a needed rank is not known to be lost: all ranks raise that, and the lowest one that is left prints it."""
        if rank in self.lost:
            error = self.lost_error([rank])
            error.raised_everywhere = self.comm.Get_rank() != min(set(range(self.comm.Get_size())) - self.lost)
            raise error

    def lost_error(self, ranks: Sequence[int]) -> UnavailableError:
        """Return the error that names ranks which are lost."""
        names = ", ".join(self.group.names[rank] for rank in sorted(ranks))
        return UnavailableError(f"{self.name}: lost {names} (killed, or its node has failed)")

    def meaning(self, error: MPI.Exception) -> Exception:
        """Return what an error of MPI means: that ranks are lost, if the job survives that; otherwise the error itself."""
        from mpi4py import MPI

        if not self.survives:
            return error
        known, deadline = self.lost, time.monotonic() + _NOTIFIED_WITHIN_SECONDS
        is_certain = error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)
        self._find_lost()
        while not is_certain and self.lost == known and time.monotonic() < deadline:
            time.sleep(_NOTIFIED_WITHIN_SECONDS / 1000)
            self._find_lost()
        return self.lost_error(sorted(self.lost)) if self.lost else error

    def _find_lost(self) -> None:
        """Find out which ranks are lost, and acknowledge it: otherwise nothing can be received from any rank."""
        failed, everybody = self.comm.Get_failed(), self.comm.Get_group()
        ranks = failed.Translate_ranks(None, everybody)
        self.comm.Ack_failed(len(ranks))
        self.lost |= set(ranks)
        failed.Free()
        everybody.Free()

    def has_ended(self, request: Request) -> bool:
        """Return whether a request has completed; raise an UnavailableError if its rank is lost."""
        try:
            return bool(request.Test())
        except _mpi_error() as error:
            raise self.meaning(error) from None

    def _is_over(self, request: Request) -> bool:
        try:
            return self.has_ended(request)
        except UnavailableError:
            return True

    def _started(self, start: Callable[..., Request], messages: Sequence[tuple[Buffer, int, int]]) -> list[Request]:
        requests: list[Request] = []
        try:
            for message in messages:
                requests.append(start(*message))
        except _mpi_error() as error:
            requests.append(_Refused(self.meaning(error)))
        except BaseException:
            keep_alive_for_peers((messages, requests))
            raise
        return requests

    def _chunks(self, view: memoryview) -> list[memoryview]:
        if len(view) <= self._most:
            return [view] if len(view) else []
        return [view[start : start + self._most] for start in range(0, len(view), self._most)]


class _Refused:
    """Stands for a request that MPI did not start, because of an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def Test(self) -> bool:  # noqa: N802 - as of a Request
        raise self._error


class Receiver:
    """Receives messages of one tag, one after the other: those of one rank, or of any."""

    def __init__(self, channel: Channel, tag: int, source: int | None = None) -> None:
        from mpi4py import MPI

        self._buffer = bytearray(_HEADER_BYTES + channel.inline_bytes)
        self._view = memoryview(self._buffer)
        self._status = MPI.Status()
        self._request = channel.comm.Recv_init(self._buffer, MPI.ANY_SOURCE if source is None else source, tag)
        self._channel, self._source = channel, source
        self._is_active = False

    def poll(self) -> Received | None:
        """Return the next message, or None if none has arrived. It is valid until the next call.

        Raises
        ------
        UnavailableError
            If the source is lost. Where that may be any rank, see `Channel.lost`.
        """
        try:
            if not self._is_active:
                self._request.Start()
                self._is_active = True
            if not self._request.Test(self._status):
                return None
        except _mpi_error() as error:
            if not self._has_come_with(error):
                return None
        self._is_active = False
        kind = self._buffer[0]
        header = _HEADERS[kind]
        _, nbytes, *fields = header.unpack_from(self._buffer)
        inline = self._view[header.size : header.size + nbytes] if nbytes <= self._channel.inline_bytes else None
        return Received(self._status.source, _KINDS[kind](*fields), nbytes, inline)

    def close(self) -> None:
        """Give up the receive that is under way, if there is one."""
        if self._is_active:
            if not self._channel.survives:  # where ranks are lost, a receive may not end
                self._request.Cancel()
                self._is_active = not self._request.Test()
            if self._is_active:  # of a message that has begun to arrive
                keep_alive_for_peers(self._buffer)
        self._request.Free()

    def _has_come_with(self, error: MPI.Exception) -> bool:
        """Return whether a message has come although MPI has raised an error.

        The loss of a rank that might have sent something leaves the receive under way. When a message comes, Open MPI may raise
        the same error again and end the receive. A request that is not under way shows as one that has ended without a source.
        """
        from mpi4py import MPI

        is_pending, status = error.Get_error_class() == MPI.ERR_PROC_FAILED_PENDING, MPI.Status()
        self._is_active = is_pending and not (self._request.Get_status(status) and status.source < 0)
        meaning = self._channel.meaning(error)
        if self._source is not None or not isinstance(meaning, UnavailableError):
            raise meaning
        return is_pending and not self._is_active


def _payload_tag(tag: int, message: Message) -> int:
    return _PAYLOAD + tag + _TAGS * (message[0] % _NUMBERS_IN_TAGS)


def _as_bytes(buffer: Buffer) -> memoryview:
    """Return the memory of a C-contiguous array, or of bytes, as bytes."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8).data if buffer.nbytes else memoryview(b"")
    return memoryview(buffer)


def _mpi_error() -> type[MPI.Exception]:
    from mpi4py import MPI

    return MPI.Exception


def _size(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, np.ndarray) else len(buffer)
