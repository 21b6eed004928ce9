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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import starmap
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat import settings
from mpistrat.errors import DeadlineExceededError, UnavailableError
from mpistrat.groups.agreement import pause
from mpistrat.groups.group import free, keep_alive_for_peers
from mpistrat.launch.abort import acknowledge_losses, survives_losses
from mpistrat.lazy import MPI
from mpistrat.logger import logger
from mpistrat.watch.recorder import recorder
from mpistrat.watch.states import others_report
from mpistrat.watch.watcher import watcher

# tags: to a server or a worker; from a server, to whoever asked; from a worker, to the chief
REQUEST, REPLY, RESULT = 1, 2, 3
BARE = 0  # in its place where a reply has no header
# what follows a header has a tag that its first field tells: what was given up is not taken for what comes later
_PAYLOAD, _TAGS, _NUMBERS_IN_TAGS = 16, 4, 4096

_INLINE_BYTES = 16 << 10
# a message below each transport's eager limit has come as a whole, and cannot stop half-way when its rank is lost
_INLINE_BYTES_WHERE_RANKS_ARE_LOST = 3 << 10
_RECORDED_FROM_SECONDS = 0.01  # a wait that is shorter is not recorded
_NOTIFIED_WITHIN_SECONDS = 2.0  # a message may fail before the launcher has reported that its rank is gone

Buffer = Any
Request = Any  # MPI.Request, or the UnavailableError of a message that was not started

# To a server.


class Create(NamedTuple):  # keep a variable, and answer; the payload: its name, dtype and shape
    variable: int


class Read(NamedTuple):  # send rows of a variable, without a header, or answer the error
    call: int
    variable: int
    start: int
    stop: int


class Gather(NamedTuple):  # likewise single rows; the payload: which
    call: int
    variable: int


class Write(NamedTuple):  # change a variable; the payload: the indices of rows, where it is by rows, and the values
    variable: int
    method: int  # an index in `METHODS`
    num_indices: int


class Flush(NamedTuple):  # answer when all that this rank has asked for before is done, with the first error of that
    call: int


# To a server or a worker.


class Define(NamedTuple):  # keep a function, which the payload is, and another one no longer
    function: int
    forgotten: int


class Run(NamedTuple):  # call a function with the payload, on a server with a variable; answer what it returns, or keep it
    call: int
    function: int
    target: int  # the variable, or as which worker
    wants_result: bool


class Forget(NamedTuple):  # nothing of the payload is used any more, numbers of variables and calls
    call: int


class Stop(NamedTuple):  # end, after what has come before
    pass


# From a server, to whoever asked, or from a worker, to the chief.


class Result(NamedTuple):  # what a call has returned, or its error
    call: int
    is_error: bool


class Stopped(NamedTuple):  # the task has ended
    pass


Message: TypeAlias = tuple[int, ...]  # one of the classes above
KINDS: tuple[Any, ...] = (Create, Read, Gather, Write, Flush, Define, Run, Forget, Stop, Result, Stopped)
# the kind, the bytes of the payload, and the fields
_HEADERS = tuple(Struct(f"=Bq{len(kind._fields)}q") for kind in KINDS)
_PACKED = {kind: (index, header.pack) for index, (kind, header) in enumerate(zip(KINDS, _HEADERS, strict=True))}
_HEADER_BYTES = max(header.size for header in _HEADERS)


class Received(NamedTuple):
    """A message that has arrived, from a rank; a payload that came with the header is valid until the next one is received."""

    source: int
    message: Any
    tag: int
    nbytes: int
    inline: memoryview | None


@dataclass(eq=False)
class Channel:
    """The chief, the workers and the servers of a job; sends messages to the other tasks, and waits for what they send."""

    comm: MPI.Comm  # of these ranks alone, in the order of the ranks of the job
    chief: int  # ranks in `comm`, in the order of their task ids
    workers: Sequence[int]
    servers: Sequence[int]
    names: Sequence[str]  # what errors call each rank: its task, rank and node
    number: int  # counts the channels of the job
    given: settings.Snapshot
    lost: frozenset[int] = frozenset()  # as far as this rank knows

    def __post_init__(self) -> None:
        self.rank, self.failure = self.comm.Get_rank(), MPI.Exception
        self.name = self.names[self.rank]
        self._task, self._does = self.name.partition(" (")[0], ""
        self.survives = survives_losses(os.environ)  # the loss of ranks
        self.inline_bytes = _INLINE_BYTES_WHERE_RANKS_ARE_LOST if self.survives else _INLINE_BYTES
        self._seconds, self._patience = self.given[settings.TIMEOUT_SECONDS], self.given[settings.STALL_SECONDS]
        self._most = self.given[settings.MAX_MESSAGE_BYTES]

    def record(self, does: str | None = None, waits_for: str = "") -> None:
        """Record what this task does, by default as before, and waits for: `mpistrat doctor` and stall reports tell it."""
        self._does = self._does if does is None else does
        text = ", ".join(filter(None, (self._does, waits_for and f"waits for {waits_for}")))
        recorder().note(activity=f"{self._task} {text}" if text else "")

    def send(self, requests: list[Request], rank: int, tag: int, message: Message, *payload: Buffer) -> list[Request]:
        """Start to send a message and C-contiguous arrays or bytes, which stay as they are until the requests have ended.

        What goes as several is received as so many: `payload` takes one. As in all methods that start something, the requests
        are added to a list, which is returned: an interrupt loses none.
        """
        views = [*map(_as_bytes, payload)]
        nbytes = sum(map(len, views))
        kind, pack = _PACKED[type(message)]
        header = pack(kind, nbytes, *message)
        if nbytes <= self.inline_bytes:
            return self._start(requests, self.comm.Isend, [(b"".join((header, *views)), rank, tag)])
        payload_tag = _payload_tag(tag, message[0])
        parts = [part for view in views for part in self._parts(view, rank, payload_tag)]
        return self._start(requests, self.comm.Isend, [(header, rank, tag), *parts])

    def send_bare(self, rank: int, call: int, array: Buffer) -> list[Request]:
        """Start to send an array as the reply to a call, without a header, to a rank that knows what it will be."""
        return self._start([], self.comm.Isend, self._parts(_as_bytes(array), rank, _payload_tag(BARE, call)))

    def receive(self, requests: list[Request], rank: int, tag: int, number: int, target: Buffer) -> list[Request]:
        """Start to receive what `send_bare` sends for a call, or a part of the payload of a message with this first field."""
        return self._start(requests, self.comm.Irecv, self._parts(_as_bytes(target), rank, _payload_tag(tag, number)))

    def report_end(self) -> None:
        """Tell the chief that this task has ended, and wait until it has taken that, and all that was sent to it before."""
        kind, pack = _PACKED[Stopped]
        taken = self._start([], self.comm.Issend, [(pack(kind, 0), self.chief, RESULT)])
        self.wait(taken, lambda: "the chief, to take what this task has sent", has_deadline=False)

    def close(self) -> None:
        """Free the communicator, when all tasks have ended; where ranks are lost, what they did not take stays in it."""
        if not self.survives:
            free(self.comm)

    def receive_payload(self, received: Received, *targets: Buffer) -> None:
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
                self.receive(requests, received.source, received.tag, received.message[0], target)
            self.wait(list(requests), lambda: f"the payload of a message from {self.names[received.source]}")
        except BaseException as error:
            if not isinstance(error, UnavailableError):
                keep_alive_for_peers(requests)
            raise

    def payload(self, received: Received) -> bytes | bytearray | memoryview:
        """Return the payload of a message; where it is inline it is valid until the next one is received."""
        if received.inline is not None:
            return received.inline
        target = bytearray(received.nbytes)
        self.receive_payload(received, target)
        return target

    def wait(self, requests: list[Request], what: Callable[[], str], *, has_deadline: bool = True) -> None:
        """Wait for requests; where their rank is lost, raise an UnavailableError when all of them have ended."""
        lost: list[UnavailableError] = []
        self.wait_until(lambda: self.have_ended(requests, lost), what, has_deadline=has_deadline)
        if lost:
            raise lost[0]

    def wait_until(self, has_come: Callable[[], object], what: Callable[[], str], *, has_deadline: bool = True) -> None:
        """Wait until a condition holds, as `wait` does."""
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
                    self.record(waits_for=what())
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
                self.record()

    def have_ended(self, requests: list[Request], lost: list[UnavailableError]) -> bool:
        """Drop requests that have ended, the last ones first, until one has not; add what the end of one says of lost ranks."""
        while requests:
            try:
                if type(requests[-1]) is UnavailableError:
                    lost.append(requests[-1])
                elif not requests[-1].Test():
                    return False
            except self.failure as error:
                lost.append(self.checked_loss(error))
            requests.pop()
        return True

    def check(self, rank: int) -> None:
        """Check that a needed rank is not known to be lost: all ranks raise that, and the lowest one that is left prints it."""
        if rank in self.lost:
            error = self.lost_error([rank])
            error.raised_everywhere = self.rank != min(set(range(self.comm.Get_size())) - self.lost)
            raise error

    def lost_error(self, ranks: Sequence[int]) -> UnavailableError:
        """Return the error that names ranks which are lost."""
        names = ", ".join(self.names[rank] for rank in sorted(ranks))
        return UnavailableError(f"{self.name}: lost {names} (killed, or its node has failed)")

    def checked_loss(self, error: MPI.Exception) -> UnavailableError:
        """Return which ranks are lost, if that is what an error of MPI means and the job survives it; raise it otherwise."""
        if not self.survives:
            raise error
        known, deadline = self.lost, time.monotonic() + _NOTIFIED_WITHIN_SECONDS
        is_certain = error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)
        self.lost |= acknowledge_losses(self.comm)
        while not is_certain and self.lost == known and time.monotonic() < deadline:
            time.sleep(_NOTIFIED_WITHIN_SECONDS / 1000)
            self.lost |= acknowledge_losses(self.comm)
        if not self.lost:
            raise error
        return self.lost_error(sorted(self.lost))

    def _meanwhile(self) -> str:
        """Return what the other ranks of the job do, on lines of their own."""
        watching = watcher()
        return "" if watching is None else f"\n{others_report(MPI.COMM_WORLD.Get_rank(), watching.compare())}"

    def _start(
        self, requests: list[Request], start: Callable[..., Request], messages: Iterable[tuple[Buffer, int, int]]
    ) -> list[Request]:
        """Start to send or receive messages; all of them, as an interrupt of the program comes before or after this one call.

        A peer that has the header of a message waits for its payload.
        """
        try:
            requests.extend(starmap(start, messages))
        except self.failure as error:
            requests.append(self.checked_loss(error))
        return requests

    def _parts(self, view: memoryview, rank: int, tag: int) -> list[tuple[Buffer, int, int]]:
        if len(view) <= self._most:
            return [(view, rank, tag)] if view else []
        return [(view[start : start + self._most], rank, tag) for start in range(0, len(view), self._most)]


class Receiver:
    """Receives messages of one tag, one after the other: those of one rank, or of any."""

    def __init__(self, channel: Channel, tag: int, source: int | None = None) -> None:
        self._buffer = bytearray(_HEADER_BYTES + channel.inline_bytes)
        self._view = memoryview(self._buffer)
        self._status = MPI.Status()
        self._request = channel.comm.Recv_init(self._buffer, MPI.ANY_SOURCE if source is None else source, tag)
        self._channel, self._source, self._tag = channel, source, tag
        self._is_active = False

    def poll(self) -> Received | None:
        """Return the next message, valid until the next call, or None; raise an UnavailableError if its one source is lost."""
        received = self.peek()
        if received is not None:
            self.accept()
        return received

    def peek(self) -> Received | None:
        """Do the same, with the same message again until it is accepted: an interrupt of the program loses none."""
        try:
            if not self._is_active:
                self._is_active = True
                self._request.Start()
            if self._status.source < 0 and not self._request.Test(self._status):
                return None
        except self._channel.failure as error:
            source, self._status.source = self._status.source, -1  # it may tell of the message before
            if not self._has_come_with(error):
                return None
            self._status.source = source
        if self._status.source < 0:  # an interrupt came before the receive was started
            self._is_active = False
            return None
        kind = self._buffer[0]
        header = _HEADERS[kind]
        _, nbytes, *fields = header.unpack_from(self._buffer)
        is_inline = nbytes <= self._channel.inline_bytes
        inline = self._view[header.size : header.size + nbytes] if is_inline else None
        return Received(self._status.source, KINDS[kind](*fields), self._tag, nbytes, inline)

    def accept(self) -> None:
        """Have the next call return the next message."""
        self._status.source = -1
        self._is_active = False

    def close(self) -> None:
        """Give up the receive that is under way, if there is one."""
        if self._is_active:
            if not self._channel.survives:  # where ranks are lost, a receive may not end
                self._request.Cancel()
                self._is_active = not self._request.Test()
            if self._is_active:  # of a message that has begun to arrive
                keep_alive_for_peers(self._buffer)
        with suppress(self._channel.failure):  # Open MPI before 5.0.11 may free none whose source is lost
            self._request.Free()

    def _has_come_with(self, error: MPI.Exception) -> bool:
        """Return whether a message has come although MPI has raised an error.

        The loss of a rank that might have sent something leaves the receive under way. When a message comes, Open MPI may raise
        the same error again and end the receive. A request that is not under way shows as one that has ended without a source.
        """
        is_pending, status = error.Get_error_class() == MPI.ERR_PROC_FAILED_PENDING, MPI.Status()
        self._is_active = is_pending and not (self._request.Get_status(status) and status.source < 0)
        loss = self._channel.checked_loss(error)
        if self._source is not None:
            raise loss
        return is_pending and not self._is_active


def _payload_tag(tag: int, number: int) -> int:
    return _PAYLOAD + tag + _TAGS * (number % _NUMBERS_IN_TAGS)


def _as_bytes(buffer: Buffer) -> memoryview:
    """Return the memory of a C-contiguous array, or of bytes, as bytes."""
    return buffer.reshape(-1).view(np.uint8).data if isinstance(buffer, np.ndarray) else memoryview(buffer)
