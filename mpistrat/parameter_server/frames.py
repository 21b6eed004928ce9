"""Frames: the messages between the tasks of a job with parameter servers, and how they are sent, received and waited for.

A frame is a header of fixed size and a payload. A payload of up to 16 KiB is sent in one message with its header; a larger one
follows in messages of its own, from where it lies in memory to where it belongs.

File law: nothing here blocks in MPI. What waits for another rank polls, looks at its deadline, and says after a while what for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat import settings
from mpistrat.errors import DeadlineExceededError
from mpistrat.groups.agreement import pause
from mpistrat.launch.openmpi import num_cores, yields_when_idle
from mpistrat.logger import logger
from mpistrat.parameter_server.activity import Activity
from mpistrat.parameter_server.tasks import TaskGroup
from mpistrat.watch.stall_report import others_report
from mpistrat.watch.watcher import watcher

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["REPLY", "REQUEST", "RESULT", "Channel", "Frame", "FrameReceiver", "Op"]

# tags: to a server or a worker; from a server, to whoever asked; from a worker, to the chief
REQUEST, REPLY, RESULT = 1, 2, 3
_PAYLOAD = 16  # is added to the tag of a frame for the messages that follow it

_HEADER = Struct("=BBHIqqq")
_INLINE_BYTES = 16 << 10
_POLLS = 100  # before the core is given away, where each rank has one of its own
_TOLD_SECONDS = 0.01  # a wait that is shorter is not recorded

Buffer = Any


class Op:
    """What a frame asks for, or answers."""

    CREATE, LOCATE, READ, READ_NEWER, READ_ROWS, ASSIGN, ASSIGN_ADD, ASSIGN_SUB, SCATTER, UPDATE, FLUSH = range(11)
    DEFINE, FORGET, RUN, MAKE, CANCEL, STOP = range(11, 17)
    DONE, FAILED, CANCELLED, STOPPED = range(17, 21)


class Frame(NamedTuple):
    """A frame that has arrived.

    Attributes
    ----------
    source : int
        The rank that sent it.
    op : int
        One of `Op`.
    method : int
        Which kind of update, where there are several.
    variable : int
        The number of the variable on its server.
    first, second : int
        Two numbers, whose meaning depends on `op`.
    nbytes : int
        Bytes of the payload.
    inline : memoryview or None
        The payload, where it came with the header; valid until the next frame is received.
    """

    source: int
    op: int
    method: int
    variable: int
    first: int
    second: int
    nbytes: int
    inline: memoryview | None


class Channel:
    """Sends frames to the other tasks, and waits for what they send.

    Parameters
    ----------
    group : TaskGroup
        The tasks; this rank is one of them.
    """

    def __init__(self, group: TaskGroup) -> None:
        assert group.comm is not None, "an evaluator takes part in no communication"
        self.group, self.comm = group, group.comm
        self.name = group.names[self.comm.Get_rank()]
        self.activity = Activity(self.name.partition(" (")[0])
        self._seconds = settings.TIMEOUT_SECONDS.read()
        self._patience = settings.STALL_SECONDS.read()
        self._most = settings.MAX_MESSAGE_BYTES.read()
        is_crowded = self.comm.Get_size() > num_cores() or yields_when_idle(os.environ)
        self.polls = 0 if is_crowded else _POLLS

    def send(
        self,
        rank: int,
        tag: int,
        op: int,
        *payload: Buffer,
        method: int = 0,
        variable: int = 0,
        first: int = 0,
        second: int = 0,
    ) -> list[MPI.Request]:
        """Start to send a frame; the payload must stay as it is until the requests that are returned have completed.

        Parameters
        ----------
        rank, tag : int
            To whom, and REQUEST, REPLY or RESULT.
        op : int
            One of `Op`.
        *payload : buffer
            C-contiguous arrays or bytes, one behind the other.
        method, variable, first, second : int
            As in `Frame`.
        """
        nbytes = sum(map(_size, payload))
        header = _HEADER.pack(op, method, len(payload), variable, first, second, nbytes)
        if nbytes <= _INLINE_BYTES:
            message = b"".join((header, *map(_as_bytes, payload)))
            return self._started([(message, rank, tag)])
        parts = [(chunk, rank, tag + _PAYLOAD) for buffer in payload for chunk in self._chunks(_as_bytes(buffer))]
        return self._started([(header, rank, tag), *parts])

    def start_receiving(self, buffer: Buffer, rank: int, tag: int) -> list[MPI.Request]:
        """Start to receive what `send_bare` sends."""
        return [self.comm.Irecv(chunk, rank, tag) for chunk in self._chunks(_as_bytes(buffer))]

    def send_bare(self, buffer: Buffer, rank: int, tag: int) -> list[MPI.Request]:
        """Start to send an array without a header, to a rank that knows what it will be."""
        return self._started([(chunk, rank, tag) for chunk in self._chunks(_as_bytes(buffer))])

    def receive_payload(self, frame: Frame, tag: int, *targets: Buffer) -> None:
        """Receive the payload of a frame into arrays that together have its size."""
        if frame.inline is not None:
            start = 0
            for target in targets:
                view = _as_bytes(target)
                view[:] = frame.inline[start : start + len(view)]
                start += len(view)
            return
        for target in targets:
            requests = [self.comm.Irecv(chunk, frame.source, tag + _PAYLOAD) for chunk in self._chunks(_as_bytes(target))]
            self.wait(requests, lambda: f"the payload of a frame from {self.group.names[frame.source]}")

    def payload(self, frame: Frame, tag: int) -> bytes | bytearray | memoryview:
        """Return the payload of a frame; where it is inline it is valid until the next frame is received."""
        if frame.inline is not None:
            return frame.inline
        target = bytearray(frame.nbytes)
        self.receive_payload(frame, tag, target)
        return target

    def wait(self, requests: Sequence[MPI.Request], what: Callable[[], str], *, has_deadline: bool = True) -> None:
        """Wait for requests.

        Parameters
        ----------
        requests : sequence of Request
            What to wait for.
        what : callable
            Says what that is, for errors.
        has_deadline : bool
            Whether MPISTRAT_TIMEOUT_SECONDS holds.

        Raises
        ------
        DeadlineExceededError
            If they have not completed in time.
        """
        for request in requests:
            if not request.Test():
                self.wait_until(request.Test, what, has_deadline=has_deadline)

    def wait_until(self, has_come: Callable[[], object], what: Callable[[], str], *, has_deadline: bool = True) -> None:
        """Wait until a condition holds, as `wait` does."""
        for _ in range(self.polls):
            if has_come():
                return
        began = time.monotonic()
        limit = self._seconds if has_deadline and self._seconds else float("inf")
        patience = self._patience or float("inf")
        is_told = False
        while not has_come():
            pause(began)
            waited = time.monotonic() - began
            if waited > _TOLD_SECONDS and not is_told:
                is_told = True
                self.activity.wait_for(what())
            if waited > limit:
                raise DeadlineExceededError(
                    f"{self.name}: waited {limit:g} s for {what()}; it may be busy with a long request, or have failed. "
                    "MPISTRAT_TIMEOUT_SECONDS sets how long to wait, 0 without a limit"
                )
            if waited > patience:
                patience *= 2
                logger.warning(f"{self.name} has waited {waited:.0f} s for {what()}{self._meanwhile()}")
        if is_told:
            self.activity.resume()

    def _meanwhile(self) -> str:
        """Return what the other ranks of the job do, on lines of their own."""
        watching = watcher()
        if watching is None:
            return ""
        states = watching.compare()
        return f"\n{others_report(self.group.job_rank, states)}"

    def _started(self, messages: Sequence[tuple[Buffer, int, int]]) -> list[MPI.Request]:
        return [self.comm.Isend(buffer, rank, tag) for buffer, rank, tag in messages]

    def _chunks(self, view: memoryview) -> list[memoryview]:
        if len(view) <= self._most:
            return [view] if len(view) else []
        return [view[start : start + self._most] for start in range(0, len(view), self._most)]


class FrameReceiver:
    """Receives frames of one tag from any rank, one after the other.

    Parameters
    ----------
    channel : Channel
        Where they come from.
    tag : int
        REQUEST, REPLY or RESULT.
    source : int, optional
        Whose frames; by default anybody's.
    """

    def __init__(self, channel: Channel, tag: int, source: int | None = None) -> None:
        from mpi4py import MPI

        self._buffer = bytearray(_HEADER.size + _INLINE_BYTES)
        self._view = memoryview(self._buffer)
        self._status = MPI.Status()
        self._request = channel.comm.Recv_init(self._buffer, MPI.ANY_SOURCE if source is None else source, tag)
        self._is_active = False

    def poll(self) -> Frame | None:
        """Return the next frame, or None if none has arrived. It is valid until the next call."""
        if not self._is_active:
            self._request.Start()
            self._is_active = True
        if not self._request.Test(self._status):
            return None
        self._is_active = False
        op, method, _, variable, first, second, nbytes = _HEADER.unpack_from(self._buffer)
        inline = self._view[_HEADER.size : _HEADER.size + nbytes] if nbytes <= _INLINE_BYTES else None
        return Frame(self._status.source, op, method, variable, first, second, nbytes, inline)

    def close(self) -> None:
        """Give up the receive that is under way, if there is one."""
        if self._is_active:
            self._request.Cancel()
            self._request.Wait()
            self._is_active = False
        self._request.Free()


def _as_bytes(buffer: Buffer) -> memoryview:
    """Return the memory of a C-contiguous array, or of bytes, as bytes."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8).data if buffer.nbytes else memoryview(b"")
    return memoryview(buffer)


def _size(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, np.ndarray) else len(buffer)
