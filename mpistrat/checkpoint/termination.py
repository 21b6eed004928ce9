"""How a rank is told to end, and what a job does then: TerminationConfig."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from mpistrat.errors import InvalidArgumentError
from mpistrat.launch.signals import ENDING

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
    signals: Sequence[int] = ENDING

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            if not callable(value := getattr(self, name) or int):
                raise InvalidArgumentError(f"{name} must be a function or None; got {value!r}")
        grace: Any = 0.0 if self.grace_period is None else self.grace_period
        if not isinstance(grace, Real) or not float(grace) >= 0.0:
            raise InvalidArgumentError(f"grace_period must be seconds >= 0, or None; got {self.grace_period!r}")
        if not isinstance(self.signals, Collection) or not _HANDLED.issuperset(self.signals):
            raise InvalidArgumentError(
                "signals must be a sequence of such that programs can handle, and not Ctrl-C's, for example "
                f"(signal.SIGTERM,); got {self.signals!r}"
            )
