"""How a rank is told to end, and what a job does then: TerminationConfig, and the signals that are heard."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.errors import InvalidArgumentError

_HANDLED = set(signal.Signals) - {signal.SIGINT, signal.SIGKILL, signal.SIGSTOP}


@dataclass(frozen=True)
class TerminationConfig:
    """How a job ends when it is told to.

    Attributes
    ----------
    termination_watcher_fn : callable, optional
        Is called at the end of each step, and returns whether this rank is told to end, besides by signals.
    exit_fn : callable, optional
        Ends the program after the last save; by default ``sys.exit(RESTART_EXIT_CODE)``, which is 42.
    grace_period : float, optional
        The seconds from the signal until the job is ended. With None or 0 it saves and leaves at once; else it saves, trains on
        until the time is nearly over, saves again, and leaves.
    save_fn : callable, optional
        Saves instead of ``manager.save(total_run_calls, wait=True)``. All ranks call it together.
    signals : sequence of signal.Signals
        By which a rank is told to end. TensorFlow, which does not have this argument, takes SIGTERM.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None
    signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            if not callable(value := getattr(self, name) or int):
                raise InvalidArgumentError(f"{name} must be a function or None; got {value!r}")
        if not (self.grace_period or 0.0) >= 0.0:
            raise InvalidArgumentError(f"grace_period must be seconds >= 0, or None; got {self.grace_period!r}")
        if not _HANDLED.issuperset(self.signals):
            raise InvalidArgumentError(f"signals must be such that programs can handle, and not Ctrl-C's; got {self.signals!r}")


class Signals:
    """The first of some signals that this process gets, and when. Their handler, of the main thread, only notes it."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.first: tuple[int, float] | None = None
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
        if self.first is None:
            self.first = number, time.monotonic()
