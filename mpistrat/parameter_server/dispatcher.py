"""Dispatcher: deals scheduled functions to the workers, takes their results, and ends workers and servers.

Where the job survives the loss of ranks, another worker takes the place of one that is lost: what that one was to do, and the
datasets that it had, are sent there again.

While something is under way, a thread beside the program takes results and sends what is queued; whoever waits does so itself.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mpistrat.errors import CancelledError, UnavailableError
from mpistrat.logger import logger
from mpistrat.parameter_server.client import Client
from mpistrat.parameter_server.frames import REQUEST, RESULT, Frame, FrameReceiver, Op
from mpistrat.parameter_server.functions import SentFunction, loads_error
from mpistrat.parameter_server.remote_value import RemoteValue, RemoteValueStatus

__all__ = ["MOST_QUEUED", "Dispatcher", "ScheduledCall"]

MOST_QUEUED = 1024
"""How many functions may be scheduled that no worker has yet: `schedule` waits for room."""
_IN_FLIGHT = 4  # functions that a worker has: one that runs, and some that it begins without asking
_BESIDE_SECONDS = 0.001
_NOTICE_SECONDS = 5.0  # in which all ranks that are left notice the loss of one


@dataclass
class ScheduledCall:
    """A function that was scheduled.

    Attributes
    ----------
    function : SentFunction
        What to run.
    arguments : callable
        Returns the arguments, as bytes, for a worker.
    value : RemoteValue
        Takes the result.
    worker : int or None
        The only worker that may run it; None if any may.
    is_kept : bool
        Whether the worker keeps what it returns.
    number : int
        Its number.
    """

    function: SentFunction
    arguments: Callable[[int], bytes]
    value: RemoteValue
    worker: int | None = None
    is_kept: bool = False
    number: int = field(default_factory=count().__next__)


class Dispatcher:
    """Knows which worker runs what.

    Parameters
    ----------
    client : Client
        That of the chief.
    """

    def __init__(self, client: Client) -> None:
        self._client, self._channel = client, client.channel
        # which rank does the work of each worker
        self._ranks = list(self._channel.group.workers)
        self._queue: deque[ScheduledCall] = deque()
        self._in_flight: dict[int, tuple[ScheduledCall, int]] = {}
        # of each worker: how many functions it has, and the number of the last one that it was given
        self._load, self._last = [0] * len(self._ranks), [-1] * len(self._ranks)
        self._made: dict[int, tuple[ScheduledCall, int]] = {}  # what workers keep, to make it again
        self._sends: list[Any] = []
        self._receiver = FrameReceiver(self._channel, RESULT)
        self._error: BaseException | None = None
        self._epoch = self._taken = 0
        self._told_to_stop, self._stopped = set[int](), set[int]()
        self._lost: frozenset[int] = frozenset()
        self._unavailable = ""
        self._released: deque[int] = deque()
        self._is_ending = self.is_closed = False
        self._lock = threading.RLock()
        self._num_waiting = 0
        self._is_busy = threading.Event()
        self._beside = threading.Thread(target=self._run_beside, name="mpistrat dispatcher", daemon=True)

    def submit(self, call: ScheduledCall) -> None:
        """Send a function to a worker that is free, or queue it; where the queue is full, wait for room.

        Raises
        ------
        UnavailableError
            If a server, or all workers, are lost.
        """
        self._client.flush()  # what this rank has written the function reads
        if len(self._queue) >= MOST_QUEUED:
            self.wait(lambda: len(self._queue) < MOST_QUEUED, "room in the queue of scheduled functions")
        with self._lock:
            if call.worker is None:
                self._queue.append(call)
            else:
                self._send(call, call.worker)
            self._pump()
        self._check_available()
        if not self._beside.is_alive():
            self._beside.start()
        self._is_busy.set()

    def release(self, number: int) -> None:
        """Have all workers forget what the call of a number made; may be called at any moment."""
        self._released.append(number)

    def pump(self) -> None:
        """Take the results that have arrived, and send queued functions to workers that are free."""
        with self._lock:
            self._pump()

    def is_idle(self) -> bool:
        """Return whether everything that was scheduled has run, failed or been cancelled."""
        return not self._queue and not self._in_flight

    def wait(self, has_come: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds, which results may bring about. There is no deadline: functions take their time."""
        self._num_waiting += 1
        try:
            while not has_come():
                taken = self._taken  # each result begins a new wait, in which the next one is looked for at once again
                self._channel.wait_until(
                    lambda taken=taken: self._pump_and(has_come) or self._taken != taken,  # type: ignore[misc]
                    lambda: self._waiting_for(what),
                    has_deadline=False,
                )
        finally:
            self._num_waiting -= 1

    def wait_for(self, value: RemoteValue) -> None:
        """Wait until a value is there, or its function has failed or been cancelled."""
        if value.status is RemoteValueStatus.NOT_READY:
            self.wait(lambda: value.status is not RemoteValueStatus.NOT_READY, "the result of a scheduled function")

    def raise_error(self) -> None:
        """Raise the first error of a function, unless it has been raised, once nothing else runs.

        Raises
        ------
        UnavailableError
            Each time, if a server, or all workers, are lost.
        """
        self._check_available()
        if self._error is None:
            return
        self.wait(self.is_idle, "functions that run while another one has failed")
        if isinstance(self._error, UnavailableError):  # a worker may notice a loss before this rank does
            deadline = time.monotonic() + _NOTICE_SECONDS
            self.wait(lambda: bool(self._unavailable) or time.monotonic() > deadline, "news of what a worker has lost")
        self._check_available()
        error, self._error = self._error, None
        raise error

    def stop(self, patience: float = math.inf) -> None:
        """Cancel what has not begun, and have first the workers end and then the servers.

        Parameters
        ----------
        patience : float
            Seconds to wait for functions that run; where they take longer, nothing is closed, and this can be called again.
        """
        if self.is_closed:
            return
        with self._lock:
            self._is_ending = True
            self._cancel_queued()
        if not self._stop(self._channel.group.workers, "the workers to end", time.monotonic() + patience):
            return
        self._stop(self._channel.group.servers, "the servers to end")
        self.is_closed = True
        self._is_busy.set()
        if self._beside.is_alive():
            self._beside.join()
        self._receiver.close()
        self._client.close()

    def dismiss(self) -> None:
        """Tell workers and servers to end, and wait for none: after a loss the end of this rank may not end them."""
        if self._channel.survives and not self.is_closed:
            with self._lock:
                for rank in (*self._channel.group.workers, *self._channel.group.servers):
                    self._send_frame(rank, Op.STOP, first=self._epoch)

    def _pump_and(self, has_come: Callable[[], bool]) -> bool:
        self.pump()
        return has_come()

    def _pump(self) -> None:
        while (frame := self._receiver.poll()) is not None:
            self._take(frame)
        if self._channel.lost != self._lost:
            self._do_without(self._channel.lost)
        if self._sends:
            self._sends = self._channel.left(self._sends)
        while self._released:
            number = self._released.popleft()
            self._made.pop(number, None)
            for rank in set(self._ranks):
                self._send_frame(rank, Op.FORGET, method=1, first=number)
        while self._queue:
            # of workers that have equally few, the one that has waited longest: short functions would all go to the first one
            load, _, worker = min(zip(self._load, self._last, range(len(self._load)), strict=True))
            if load >= _IN_FLIGHT:
                break
            self._send(self._queue.popleft(), worker)

    def _send(self, call: ScheduledCall, worker: int) -> None:
        rank = self._ranks[worker]
        self._in_flight[call.number] = call, worker
        if call.is_kept and self._channel.survives:
            self._made[call.number] = call, worker
        self._load[worker] += 1
        self._last[worker] = call.number
        self._sends += self._client.functions.send(call.function, rank)
        self._send_frame(
            rank,
            Op.MAKE if call.is_kept else Op.RUN,
            call.arguments(worker),
            variable=self._epoch,
            first=call.number,
            second=call.function.number,
        )

    def _send_frame(self, rank: int, op: int, *payload: bytes, **numbers: int) -> None:
        """Start to send a frame to a worker or server."""
        self._sends += self._channel.send(rank, REQUEST, op, *payload, **numbers)

    def _take(self, frame: Frame) -> None:
        self._taken += 1
        if frame.op == Op.STOPPED:
            self._stopped.add(frame.source)
            return
        try:
            data = bytes(self._channel.payload(frame, RESULT))
        except UnavailableError:
            return
        if frame.source in self._channel.lost or frame.first not in self._in_flight:
            return  # another worker runs it, or nobody wants it any more
        call, worker = self._in_flight.pop(frame.first)
        self._load[worker] -= 1
        if frame.op == Op.DONE:
            call.value.set_data(data)
        elif frame.op == Op.CANCELLED:
            call.value.abort(self._cancelled_error(call))
        else:
            self._fail(call, loads_error(data))

    def _fail(self, call: ScheduledCall, error: BaseException) -> None:
        call.value.abort(error)
        if self._error is None:
            self._error = error
        self._cancel_queued()
        for worker in {worker for _, worker in self._in_flight.values()}:
            self._send_frame(self._ranks[worker], Op.CANCEL, first=self._epoch)
        self._epoch += 1

    def _do_without(self, lost: frozenset[int]) -> None:
        """Have other workers do what lost ones did; without a server, or without any worker, cancel everything."""
        newly_lost, self._lost = lost - self._lost, lost
        if self._unavailable:
            return
        left = [rank for rank in self._channel.group.workers if rank not in lost]
        if self._is_ending or not left or newly_lost.intersection(self._channel.group.servers):
            self._give_up(newly_lost)
            return
        for worker, rank in enumerate(self._ranks):
            if rank in newly_lost:
                self._ranks[worker] = min(left, key=self._ranks.count)
                self._send_again(worker)
                other = self._channel.group.names[self._ranks[worker]]
                logger.warning(f"{self._channel.lost_error([rank])}; {other} does its work from now on")

    def _send_again(self, worker: int) -> None:
        """Send to the rank that now does the work of a worker what it had, and what it was to run."""
        had = [call for call, one in self._made.values() if one == worker]
        was_to_run = [call for call, one in self._in_flight.values() if one == worker and not call.is_kept]
        for call in was_to_run:
            del self._in_flight[call.number]
        self._load[worker] = 0
        for call in had:
            self._send(call, worker)
        for call in was_to_run:
            if self._error is None:
                self._send(call, worker)
            else:
                call.value.abort(self._cancelled_error(call))

    def _give_up(self, newly_lost: Collection[int]) -> None:
        """Cancel everything, since nothing can run any more."""
        if not self._is_ending:
            self._unavailable = str(self._channel.lost_error(sorted(newly_lost)))
        self._cancel_queued()
        for call, _ in self._in_flight.values():
            call.value.abort(self._cancelled_error(call))
        self._in_flight.clear()
        self._load = [0] * len(self._ranks)

    def _check_available(self) -> None:
        if self._unavailable:
            raise UnavailableError(self._unavailable)

    def _cancelled_error(self, call: ScheduledCall) -> CancelledError:
        why = self._unavailable or "the strategy was closed"
        if self._error is not None:
            why = "another one had failed; schedule it again, if it is to run"
        error = CancelledError(f"{self._channel.name}: function {call.function.name} was cancelled before it ran: {why}")
        error.__cause__ = self._error
        return error

    def _cancel_queued(self) -> None:
        for queued in self._queue:
            queued.value.abort(self._cancelled_error(queued))
        self._queue.clear()

    def _stop(self, ranks: Sequence[int], what: str, deadline: float = math.inf) -> bool:
        """Have ranks end, and return whether they have before the deadline."""

        def have_ended() -> bool:
            return self._stopped | self._channel.lost >= set(ranks)

        with self._lock:
            for rank in set(ranks) - self._told_to_stop:
                self._send_frame(rank, Op.STOP, first=self._epoch)
            self._told_to_stop |= set(ranks)
        self.wait(lambda: have_ended() or time.monotonic() > deadline, what)
        return have_ended()

    def _waiting_for(self, what: str) -> str:
        running = sorted({worker for _, worker in list(self._in_flight.values())})
        names = ", ".join(self._channel.group.names[self._ranks[worker]] for worker in running)
        return what + (f"; {len(self._in_flight)} are at {names}" if running else "")

    def _run_beside(self) -> None:
        while not self.is_closed:
            if self.is_idle():
                self._is_busy.clear()
                if self.is_idle():
                    self._is_busy.wait()
            if not self._num_waiting:
                self.pump()
            time.sleep(_BESIDE_SECONDS)
