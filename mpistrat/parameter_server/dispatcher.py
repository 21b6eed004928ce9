"""Dispatcher: deals scheduled functions to the workers, takes their results, and ends workers and servers.

Where the job survives the loss of ranks, another worker takes the place of one that is lost: what that one was to do, and the
datasets that it had, are sent there again.

While something is under way, a thread beside the program takes results and sends what is queued; whoever waits does so itself.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mpistrat.errors import CancelledError, UnavailableError
from mpistrat.logger import logger
from mpistrat.parameter_server import messages
from mpistrat.parameter_server.client import Client, numbers
from mpistrat.parameter_server.functions import Pickled, SentFunction, dumps, loads, loads_error
from mpistrat.parameter_server.messages import REQUEST, RESULT, Received, Receiver

MOST_QUEUED = 1024
"""How many functions may be scheduled that no worker has yet: `schedule` waits for room."""
_BESIDE_SECONDS = 0.001
_NOTICE_SECONDS = 5.0  # in which all ranks that are left notice the loss of one


class RemoteValueStatus(Enum):
    """Whether a value is there."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class RemoteValue:
    """What a scheduled function returns, once it has run. `ClusterCoordinator.schedule` returns one."""

    def __init__(self, wait: Callable[[RemoteValue], None]) -> None:
        self._wait = wait
        self._status = RemoteValueStatus.NOT_READY
        self._data: bytes | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def status(self) -> RemoteValueStatus:
        """Whether the value is there: NOT_READY, READY, or ABORTED where the function failed or was cancelled."""
        return self._status

    def fetch(self) -> Any:
        """Wait for the value, and return it.

        Raises
        ------
        Exception
            The error of the function.
        CancelledError
            If it was cancelled because of another function's error, or because the strategy was closed.
        """
        self._wait(self)
        if self._error is not None:
            raise self._error
        data = self._data
        if data is not None:
            self._value, self._data = loads(data), None
        return self._value

    get = fetch

    def set_data(self, data: bytes) -> None:
        """Take the result of the function, as bytes."""
        self._data, self._status = data, RemoteValueStatus.READY

    def abort(self, error: BaseException) -> None:
        """Take the error of the function, or that it was cancelled."""
        self._error, self._status = error, RemoteValueStatus.ABORTED

    def __repr__(self) -> str:
        return f"RemoteValue({self._status.name})"


@dataclass(eq=False)
class ScheduledCall:
    """A function that was scheduled: on any worker; or on one alone, which keeps what it returns."""

    function: SentFunction
    arguments: Pickled
    value: RemoteValue
    worker: int | None = None
    number: int = field(default_factory=numbers.__next__)
    sent_to: int = -1


class Dispatcher:
    """Knows which worker runs what; the chief has one."""

    def __init__(self, client: Client) -> None:
        self._client, self._channel = client, client.channel
        # which rank does the work of each worker
        self._ranks = list(self._channel.workers)
        self._queue: deque[ScheduledCall] = deque()
        self._in_flight: dict[int, ScheduledCall] = {}
        self._last = [-1] * len(self._ranks)  # the number of the last function that each worker was given
        # what made what workers keep: the chief holds each for as long as it refers to that
        self._made: weakref.WeakValueDictionary[int, ScheduledCall] = weakref.WeakValueDictionary()
        self._sends: list[messages.Request] = []
        self._receiver = Receiver(self._channel, RESULT)
        self._error: BaseException | None = None
        self._taken = 0
        self._told_to_stop, self._stopped = set[int](), set[int]()
        self._lost: frozenset[int] = frozenset()
        self._unavailable = ""
        self._is_ending = self.is_closed = self._is_pumping = False
        self._lock = threading.RLock()
        self._num_waiting = 0
        self._begun = threading.Lock()  # free when something has begun; unlike an Event it bears an interrupt anywhere
        self._beside = threading.Thread(target=self._run_beside, name="mpistrat dispatcher", daemon=True)

    def check_open(self, method: str) -> None:
        """Check that workers have not been told to end."""
        if self._is_ending:
            raise RuntimeError(f"{method}: the strategy was closed, and its workers have ended, or are about to")

    def submit(self, call: ScheduledCall) -> None:
        """Send a function to a worker that is free, or queue it; where the queue is full, wait for room."""
        self._client.flush()  # what this rank has written the function reads
        if len(self._queue) >= MOST_QUEUED:
            self.wait(lambda: len(self._queue) < MOST_QUEUED, "room in the queue of scheduled functions")
        with self._lock:
            self.check_open("schedule")  # another thread may have closed since: nobody would run it
            if call.worker is None:
                self._queue.append(call)
            else:
                self._send(call, call.worker)
            self._pump()
            if self._beside.ident is None:
                self._beside.start()
        self._check_available()
        self._wake_beside()

    def pump(self) -> None:
        """Take the results that have arrived, and send queued functions to workers that are free."""
        with self._lock:
            if not self.is_closed:
                self._pump()

    def is_idle(self) -> bool:
        """Return whether everything that was scheduled has run, failed or been cancelled."""
        with self._lock:  # not while the thread beside the program has a call that is in neither
            return not self._queue and not self._in_flight

    def wait(self, has_come: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds, which results may bring about. There is no deadline: functions take their time."""
        taken = self._taken

        def has_moved() -> bool:
            self.pump()
            return has_come() or self._taken != taken

        self._num_waiting += 1
        try:
            while not has_come():
                taken = self._taken  # each result begins a new wait, in which the next one is looked for at once again
                self._channel.wait_until(has_moved, lambda: self._waiting_for(what), has_deadline=False)
        finally:
            self._num_waiting -= 1

    def wait_for(self, value: RemoteValue) -> None:
        """Wait until a value is there, or its function has failed or been cancelled."""
        if value.status is RemoteValueStatus.NOT_READY:
            self.wait(lambda: value.status is not RemoteValueStatus.NOT_READY, "the result of a scheduled function")

    def raise_error(self) -> None:
        """Raise the first error of a function once nothing else runs; where a server or all workers are lost, each time."""
        self._check_available()
        if self._error is None:
            return
        self.wait(self.is_idle, "functions that run while another one has failed")
        if isinstance(self._error, UnavailableError):  # a worker may notice a loss before this rank does
            deadline = time.monotonic() + _NOTICE_SECONDS
            self.wait(lambda: bool(self._unavailable) or time.monotonic() > deadline, "news of what a worker has lost")
        self._check_available()
        error, self._error = self._error, None
        if error is not None:  # no other thread has raised it meanwhile
            raise error

    def stop(self, patience: float = math.inf) -> None:
        """Cancel what has not begun, and end the workers, then the servers; where functions run for longer, call it again."""
        if self.is_closed:
            return
        with self._lock:
            self._is_ending = True
            self._cancel_queued()
        if not self._stop(self._channel.workers, "the workers to end", time.monotonic() + patience):
            return
        self._stop(self._channel.servers, "the servers to end")
        self.is_closed = True
        self._wake_beside()
        if self._beside.is_alive():
            self._beside.join()
        self._receiver.close()
        self._client.close()
        self._channel.close()

    def _pump(self) -> None:
        if self._is_pumping:
            raise RuntimeError("this thread gives work to workers: signal handlers must not use the coordinator meanwhile")
        self._is_pumping = True
        try:
            self._take_and_send()
        finally:
            self._is_pumping = False

    def _take_and_send(self) -> None:
        while (received := self._receiver.peek()) is not None:
            self._taken += 1
            if type(received.message) is messages.Stopped:
                self._stopped.add(received.source)
                self._receiver.accept()
            else:
                self._take_result(received)
        if self._channel.lost != self._lost:
            self._do_without(self._channel.lost)
        if self._sends:
            self._sends = [request for request in self._sends if not self._channel.have_ended([request], [])]
        if self._client.dropped and not self._is_ending:  # free what no object of the chief and no scheduled call refers to
            dropped = [self._client.dropped.popleft() for _ in range(len(self._client.dropped))]
            message, payload = messages.Forget(next(numbers)), dumps(dropped, "what was dropped")
            for rank in (*self._channel.workers, *self._channel.servers):
                self._channel.send(self._sends, rank, REQUEST, message, payload)
        while self._queue:
            # one at a time, since the next one would wait behind a long one while others have nothing to do; to the worker that
            # has waited longest: short functions would all go to the first one
            busy = {self._ranks[call.sent_to] for call in self._in_flight.values()}
            free = [worker for worker, rank in enumerate(self._ranks) if rank not in busy]
            if not free:
                break
            self._send(self._queue[0], min(free, key=self._last.__getitem__))
            self._queue.popleft()  # now, since one that is sent twice is better than one that an interrupt has lost

    def _send(self, call: ScheduledCall, worker: int) -> None:
        rank, is_kept = self._ranks[worker], call.worker is not None
        if is_kept:
            self._made[call.number] = call
        self._last[worker] = call.number
        message = messages.Run(call.number, self._client.functions.send(self._sends, rank, call.function), worker, not is_kept)
        self._channel.send(self._sends, rank, REQUEST, message, call.arguments.data)
        call.sent_to, self._in_flight[call.number] = worker, call

    def _take_result(self, received: Received) -> None:
        """Give a call its result; one that does not come whole fails the call, since it does not come again."""
        number, is_error = received.message
        call = None if received.source in self._channel.lost else self._in_flight.get(number)
        try:
            self._receiver.accept()
            data = bytes(self._channel.payload(received))
            if call is None:
                return  # another worker runs it, or nobody wants it any more
            if is_error:
                self._fail(call, loads_error(data))
            else:
                call.value.set_data(data)
                self._in_flight.pop(number, None)
        except UnavailableError:
            return
        except BaseException as error:
            if call is not None:
                given_up = f"{self._channel.name}: the result of function {call.function.name} was given up"
                self._fail(call, error if isinstance(error, Exception) else CancelledError(given_up))
            if not isinstance(error, Exception):
                raise

    def _fail(self, call: ScheduledCall, error: BaseException) -> None:
        call.value.abort(error)
        self._in_flight.pop(call.number, None)
        if self._error is None:
            self._error = error
        self._cancel_queued()

    def _do_without(self, lost: frozenset[int]) -> None:
        """Have other workers do what lost ones did; without a server, or without any worker, cancel everything."""
        newly_lost, self._lost = lost - self._lost, lost
        if self._unavailable:
            return
        left = [rank for rank in self._channel.workers if rank not in lost]
        if self._is_ending or not left or newly_lost.intersection(self._channel.servers):
            if not self._is_ending:
                self._unavailable = str(self._channel.lost_error(sorted(newly_lost)))
            self._cancel_queued()
            self._cancel(self._in_flight.values())
            self._in_flight.clear()
            return
        for worker, rank in enumerate(self._ranks):
            if rank in newly_lost:
                self._ranks[worker] = min(left, key=self._ranks.count)
                self._send_again(worker)
                other = self._channel.names[self._ranks[worker]]
                logger.warning(f"{self._channel.lost_error([rank])}; {other} does its work from now on")

    def _send_again(self, worker: int) -> None:
        """Send to the rank that now does the work of a worker what it had; what it was to run goes to any that is free."""
        had = sorted((call for call in self._made.values() if call.worker == worker), key=lambda call: call.number)
        was_to_run = [call for call in self._in_flight.values() if call.sent_to == worker]
        for call in was_to_run:
            del self._in_flight[call.number]
        for call in had:
            self._send(call, worker)
        for call in was_to_run:
            if call.worker is not None:
                continue  # it is made again, or nobody wants it any more
            if self._error is not None:
                self._cancel([call])
            else:
                self._queue.appendleft(call)

    def _check_available(self) -> None:
        if self._unavailable:
            raise UnavailableError(self._unavailable)

    def _cancel_queued(self) -> None:
        self._cancel(self._queue)
        self._queue.clear()

    def _cancel(self, calls: Iterable[ScheduledCall]) -> None:
        why = self._unavailable or "the strategy was closed"
        if self._error is not None:
            why = "another one had failed; schedule it again, if it is to run"
        for call in calls:
            error = CancelledError(f"{self._channel.name}: function {call.function.name} was cancelled before it ran: {why}")
            error.__cause__ = self._error
            call.value.abort(error)

    def _stop(self, ranks: Sequence[int], what: str, deadline: float = math.inf) -> bool:
        """Have ranks end, and return whether they have before the deadline."""

        def have_ended() -> bool:
            return self._stopped | self._channel.lost >= set(ranks)

        with self._lock:
            for rank in set(ranks) - self._told_to_stop:
                self._channel.send(self._sends, rank, REQUEST, messages.Stop())
            self._told_to_stop |= set(ranks)
        self.wait(lambda: have_ended() or time.monotonic() > deadline, what)
        return have_ended()

    def _waiting_for(self, what: str) -> str:
        running = sorted({call.sent_to for call in list(self._in_flight.values())})
        names = ", ".join(self._channel.names[self._ranks[worker]] for worker in running)
        return what + (f"; {len(self._in_flight)} are at {names}" if running else "")

    def _wake_beside(self) -> None:
        with suppress(RuntimeError):  # it is free already
            self._begun.release()

    def _run_beside(self) -> None:
        while not self.is_closed:
            if self.is_idle():
                self._begun.acquire()
            if not self._num_waiting:
                self.pump()
            time.sleep(_BESIDE_SECONDS)
