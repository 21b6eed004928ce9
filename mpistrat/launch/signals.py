"""Signals that tell a process to end, which it hears instead of dying at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What queues and launchers send before they end a job."""


class Signals:
    """The first of some signals that this process gets, and when. A handler, on the main thread, only notes it."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.first: tuple[int, float] | None = None
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        for number in numbers:
            self._previous[number] = signal.signal(number, self._hear)

    def ignore(self) -> None:
        """Ignore them from now on: while the program ends, the interpreter would let them kill the process."""
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Handle them as before."""
        while self._previous:
            number, previous = self._previous.popitem()
            signal.signal(number, signal.SIG_DFL if previous is None else previous)  # None: it was not set by Python

    def _hear(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:  # a forked child, which somebody waits for after Process.terminate
            self.restore()
            signal.raise_signal(number)
        elif self.first is None:
            self.first = number, time.monotonic()
