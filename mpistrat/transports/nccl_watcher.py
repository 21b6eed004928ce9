"""NcclWatcher: a thread that finds the errors of NCCL calls that nobody waits for on the host.

What NCCL should have written is undefined after an error. A program that makes no further collective would go on with it, to an
optimizer or a checkpoint: so the thread raises if the program has not within a second, which ends the job (`launch.abort`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from mpistrat.device.abstract import Device, Event
from mpistrat.transports.steps import WAITING, Steps

CHECK_SECONDS = 0.02
UNSEEN_SECONDS = 1.0
STOP_SECONDS = 10.0  # it may be aborting a communicator, which NCCL can block in


class NcclWatcher:
    """Looks after what was enqueued until it has ended."""

    def __init__(
        self,
        name: str,
        device: Device,
        check: Callable[[], None],
        must_wait: Callable[[], bool],
        peer_has_aborted: Callable[[], bool],
        has_raised: Callable[[], bool],
    ) -> None:
        self._device, self._check, self._has_raised = device, check, has_raised
        self.must_wait, self.peer_has_aborted = must_wait, peer_has_aborted
        self._under_way: deque[Event] = deque()
        self._has_work, self._is_raised, self._is_stopped = threading.Event(), threading.Event(), False
        # a daemon: a program that ends waits for nothing that was only enqueued
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Look after all that comes before an event."""
        self._under_way.append(event)
        self._has_work.set()

    def note_raised(self) -> None:
        """Note that the calling thread, if it is not this one, raises what has been found."""
        if threading.current_thread() is not self._thread:
            self._is_raised.set()

    def settle(self) -> Steps:
        """Return the steps that wait until all has ended."""
        while self._under_way:
            yield WAITING

    def stop(self) -> None:
        """End the thread; one that is blocked in NCCL is left behind."""
        self._is_stopped = True
        self._has_work.set()
        self._is_raised.set()
        self._thread.join(STOP_SECONDS)

    def _work(self) -> None:
        with self._device.activate():  # a new thread computes on GPU 0
            while self._has_work.wait() and not self._is_stopped:
                self._has_work.clear()
                try:
                    self._look_after()
                except Exception:  # raised where the communicator is used next; nothing waits for what does not end
                    self._under_way.clear()
                    if not self._is_raised_in_time():
                        raise

    def _is_raised_in_time(self) -> bool:
        ends = time.monotonic() + UNSEEN_SECONDS
        while not (self._has_raised() or self._is_raised.wait(CHECK_SECONDS)):
            if time.monotonic() > ends:
                return False
        return True

    def _look_after(self) -> None:
        """Wait until all has ended; return early where the thread is to end."""
        while self._under_way and not self._is_stopped:
            if self._under_way[0].done():
                self._under_way.popleft()
            else:
                self._check()
                time.sleep(CHECK_SECONDS)
