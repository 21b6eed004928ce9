"""NcclWatcher: a thread that looks after NCCL calls that nobody waits for on the host, until they have ended.

What NCCL should have written is undefined after an error. A program that makes no further collective would go on with it, to an
optimizer or a checkpoint: so the thread raises if the program has not within a second, which ends the job (`launch.abort`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from mpistrat.device.cuda import Device, Event, Stream
from mpistrat.steps import Steps, until
from mpistrat.transports.base import Watched

CHECK_SECONDS, UNSEEN_SECONDS, IDLE_SECONDS = 0.02, 1.0, 1.0
STOP_SECONDS = 10.0  # the watcher may be aborting a communicator, which NCCL can block in


class NcclWatcher:
    """The watcher of one communicator: `check` raises what NCCL has found, `give_up` aborts what is overdue, and raises."""

    def __init__(
        self, name: str, device: Device, check: Callable[[], None], give_up: Callable[[float], None], watched: Watched
    ) -> None:
        self.device, self._check, self._give_up, self.watched = device, check, give_up, watched
        self._limited: deque[_Limited] = deque()
        self._spare: list[Event] = []  # events that nothing waits for any more
        # how many operations were added, how many have ended as far as is known, and the event that the last one recorded
        self._added = self._ended = 0
        self._event: Event | None = None
        self._is_raised = self._is_stopped = self._has_failed = False
        # what wakes the thread: an interrupt of the program in a `threading.Event` would leave that locked
        self._told, self._sleeps = SimpleQueue[None](), True
        # a daemon: a program that ends waits for nothing that was only enqueued
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def begin_limit(self, stream: Stream) -> _Limited | None:
        """Return the limit of what comes next on a stream, if the present operation has a deadline."""
        ends = self.watched.ends()
        return _Limited(stream, stream.record(self._spare_event()), ends - time.monotonic()) if ends else None

    def _spare_event(self) -> Event | None:
        return self._spare.pop() if self._spare else None

    def add(self, event: Event, limited: _Limited | None = None) -> None:
        """Look after all that comes before an event, which each operation may record again.

        The deadline of what its stream was given since `begin_limit` counts from when the GPU has come to that.
        """
        if limited is not None:
            limited.ended = limited.stream.record(self._spare_event())
            self._limited.append(limited)
        self._event = event
        self._added += 1
        if self._sleeps:  # to wake a thread takes both ten microseconds
            self._sleeps = False
            self._told.put(None)

    def note_raised(self) -> None:
        """Note that the calling thread, if it is not this one, raises what has been found."""
        if threading.current_thread() is not self._thread:
            self._is_raised = True
            self._told.put(None)

    def settle(self) -> Steps:
        """Return the steps that wait until all has ended, without waiting for the thread to look."""
        return until(self._has_ended)

    def stop(self) -> None:
        """End the thread; one that is blocked in NCCL is left behind."""
        self._is_stopped = self._is_raised = True
        self._told.put(None)
        self._thread.join(STOP_SECONDS)

    def _has_ended(self) -> bool:
        """Return whether what was added before this call has ended."""
        added, event = self._added, self._event
        if self._ended < added and event is not None:
            with self.device.activate():  # the engine asks too, where it combines arrays of the host
                self._ended = added if event.done() else self._ended
        return self._has_failed or self._ended >= added

    def _work(self) -> None:
        with self.device.activate():  # a new thread computes on GPU 0
            while not self._is_stopped:
                if self._ended == self._added:
                    self._told.get()
                try:
                    self._look_after()
                except Exception:  # raised where the communicator is used next; nothing waits for what does not end
                    self._has_failed = True
                    if not self._is_raised_in_time():
                        raise
                    return
                finally:
                    self._sleeps = True

    def _is_raised_in_time(self) -> bool:
        ends = time.monotonic() + UNSEEN_SECONDS
        while not (self.watched.has_raised() or self._is_raised):
            if time.monotonic() > ends:
                return False
            self._pause()
        return True

    def _pause(self) -> None:
        with suppress(Empty):
            self._told.get(timeout=CHECK_SECONDS)

    def _look_after(self) -> None:
        """Look every 20 ms, until nothing has been under way for a second; return early where the thread is to end."""
        self._sleeps, idle_since = False, time.monotonic()
        while not self._is_stopped and time.monotonic() < idle_since + IDLE_SECONDS:
            if self._added > self._ended:
                idle_since = time.monotonic()
                if not self._has_ended():
                    self._check()
                self._look_at_deadlines()
            self._pause()

    def _look_at_deadlines(self) -> None:
        while self._limited and (first := self._limited[0]).ended.done():
            self._limited.popleft()
            self._spare += first.begun, first.ended
        if self._limited and (first := self._limited[0]).is_overdue():
            self.watched.tell_peers()
            self._give_up(first.seconds)


class _Limited:
    """An operation with a deadline: events before and after it, and the seconds that it may take."""

    ended: Event

    def __init__(self, stream: Stream, begun: Event, seconds: float) -> None:
        self.stream, self.begun, self.seconds, self._since = stream, begun, seconds, math.inf

    def is_overdue(self) -> bool:
        now = time.monotonic()
        if self._since == math.inf and self.begun.done():
            self._since = now
        return now > self._since + self.seconds
