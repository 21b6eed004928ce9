"""Frames: the messages between the tasks of a job with parameter servers, and how they are sent, received and waited for.

A frame is a header of fixed size and a payload. A small payload is sent in one message with its header; a larger one follows in
messages of its own, from where it lies in memory to where it belongs.

File law: nothing here blocks in MPI. What waits for another rank polls, looks at its deadline, and says after a while what for;
where the job survives the loss of ranks, it ends with an UnavailableError if that rank is lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat import settings
from mpistrat.errors import DeadlineExceededError, UnavailableError
from mpistrat.groups.agreement import pause
from mpistrat.launch import survival
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
_NO_MESSAGE = 4  # no message has this tag
_PAYLOAD = 16  # is added to the tag of a frame for the messages that follow it

_HEADER = Struct("=BBHIqqq")
_INLINE_BYTES = 16 << 10
# a message below each transport's eager limit has come as a whole, and cannot stop half-way when its rank is lost
_INLINE_BYTES_WHERE_RANKS_ARE_LOST = 3 << 10
_POLLS = 100  # before the core is given away, where each rank has one of its own
_RECORDED_FROM_SECONDS = 0.01  # a wait that is shorter is not recorded
_NOTIFIED_WITHIN_SECONDS = 2.0  # a message may fail before the launcher has reported that its rank is gone

Buffer = Any
Request = Any  # MPI.Request, or _Refused


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
    ) -> list[Request]:
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

        Returns
        -------
        list of Request
            To wait for; where the rank is lost, that raises.
        """
        nbytes = sum(map(_size, payload))
        header = _HEADER.pack(op, method, len(payload), variable, first, second, nbytes)
        if nbytes <= self.inline_bytes:
            message = b"".join((header, *map(_as_bytes, payload)))
            return self._started(self.comm.Isend, [(message, rank, tag)])
        parts = [(chunk, rank, tag + _PAYLOAD) for buffer in payload for chunk in self._chunks(_as_bytes(buffer))]
        return self._started(self.comm.Isend, [(header, rank, tag), *parts])

    def start_receiving(self, buffer: Buffer, rank: int, tag: int) -> list[Request]:
        """Start to receive what `send_bare` sends."""
        return self._started(self.comm.Irecv, [(chunk, rank, tag) for chunk in self._chunks(_as_bytes(buffer))])

    def send_bare(self, buffer: Buffer, rank: int, tag: int) -> list[Request]:
        """Start to send an array without a header, to a rank that knows what it will be."""
        return self._started(self.comm.Isend, [(chunk, rank, tag) for chunk in self._chunks(_as_bytes(buffer))])

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
            requests = self.start_receiving(target, frame.source, tag + _PAYLOAD)
            self.wait(requests, lambda: f"the payload of a frame from {self.group.names[frame.source]}")

    def payload(self, frame: Frame, tag: int) -> bytes | bytearray | memoryview:
        """Return the payload of a frame; where it is inline it is valid until the next frame is received."""
        if frame.inline is not None:
            return frame.inline
        target = bytearray(frame.nbytes)
        self.receive_payload(frame, tag, target)
        return target

    def wait(self, requests: Sequence[Request], what: Callable[[], str], *, has_deadline: bool = True) -> None:
        """Wait for requests.

        Parameters
        ----------
        requests : sequence of Request
            What to wait for.
        what : callable
            Returns what that is, for errors.
        has_deadline : bool
            Whether MPISTRAT_TIMEOUT_SECONDS holds.

        Raises
        ------
        DeadlineExceededError
            If they have not completed in time.
        UnavailableError
            If their rank is lost; all of them have ended then.
        """
        lost: UnavailableError | None = None
        for request in requests:
            try:
                if not self._has_ended(request):
                    self.wait_until(partial(self._has_ended, request), what, has_deadline=has_deadline)
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

    def has_lost(self, rank: int) -> bool:
        """Return whether a rank is known to be lost, and let MPI hear of losses: it does so only while it is called."""
        if self.survives and rank not in self.lost:
            try:
                self.comm.Iprobe(rank, _NO_MESSAGE)
            except _mpi_error() as error:
                meaning = self.meaning(error)
                if not isinstance(meaning, UnavailableError):
                    raise meaning from None
        return rank in self.lost

    def check(self, rank: int) -> None:
        """Check that a rank which this one cannot do without is not known to be lost.

        Raises
        ------
        UnavailableError
            If it is. All ranks raise it, and the lowest one that is left prints it.
        """
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

    def _has_ended(self, request: Request) -> bool:
        try:
            return bool(request.Test())
        except _mpi_error() as error:
            raise self.meaning(error) from None

    def _is_over(self, request: Request) -> bool:
        try:
            return self._has_ended(request)
        except UnavailableError:
            return True

    def _started(self, start: Callable[..., Request], messages: Sequence[tuple[Buffer, int, int]]) -> list[Request]:
        requests: list[Request] = []
        try:
            for message in messages:
                requests.append(start(*message))
        except _mpi_error() as error:
            requests.append(_Refused(self.meaning(error)))
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

        self._buffer = bytearray(_HEADER.size + channel.inline_bytes)
        self._view = memoryview(self._buffer)
        self._status = MPI.Status()
        self._request = channel.comm.Recv_init(self._buffer, MPI.ANY_SOURCE if source is None else source, tag)
        self._channel, self._source = channel, source
        self._is_active = False

    def poll(self) -> Frame | None:
        """Return the next frame, or None if none has arrived. It is valid until the next call.

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
        op, method, _, variable, first, second, nbytes = _HEADER.unpack_from(self._buffer)
        inline = self._view[_HEADER.size : _HEADER.size + nbytes] if nbytes <= self._channel.inline_bytes else None
        return Frame(self._status.source, op, method, variable, first, second, nbytes, inline)

    def close(self) -> None:
        """Give up the receive that is under way, if there is one."""
        if self._is_active and not self._channel.survives:  # where ranks are lost, a receive may not end
            self._request.Cancel()
            self._request.Wait()
            self._is_active = False
        self._request.Free()

    def _has_come_with(self, error: MPI.Exception) -> bool:
        """Return whether a frame has come although MPI has raised an error.

        The loss of a rank that might have sent something leaves the receive under way. When a frame comes, Open MPI may raise
        the same error again and end the receive. A request that is not under way shows as one that has ended without a source.
        """
        from mpi4py import MPI

        is_pending, status = error.Get_error_class() == MPI.ERR_PROC_FAILED_PENDING, MPI.Status()
        self._is_active = is_pending and not (self._request.Get_status(status) and status.source < 0)
        meaning = self._channel.meaning(error)
        if self._source is not None or not isinstance(meaning, UnavailableError):
            raise meaning
        return is_pending and not self._is_active


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
