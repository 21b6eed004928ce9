"""CollectiveCall: a collective call of this rank: what errors call it, and its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.groups.agreement import after

__all__ = ["CollectiveCall"]

# what a call that has met all ranks at the last moment may still take
_LEAST_SECONDS = 0.2


@dataclass
class CollectiveCall:
    """A collective call: what errors call it, and its deadline.

    Attributes
    ----------
    number : int
        Its sequence number.
    verb : str
        What it does.
    describe : callable
        Returns it with its arguments.
    options : CommunicationOptions
        All that hold for it.
    is_started : bool
        Whether the engine carries it out while the program goes on.
    ends : float
        When its time is up, on the clock of `time.monotonic`; 0 means never, or that its turn has not come.
    noted : int
        The word of what was noted before it.
    notes : tuple of str
        The texts of that.
    """

    number: int
    verb: str
    describe: Callable[[], str]
    options: CommunicationOptions
    is_started: bool = False
    ends: float = 0.0
    noted: int = 0
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return f"collective {self.number}, {self.describe()}"

    @property
    def text(self) -> str:
        """The call with its arguments, and with what was noted before that is not a matter of course."""
        return f"{self.describe()}{after(self.notes)}"

    @property
    def seconds(self) -> float:
        """The deadline in seconds from the beginning; 0 means none."""
        return self.options.timeout_seconds or 0.0

    def begin(self) -> None:
        """Let its time run: its turn has come."""
        self.ends = time.monotonic() + self.seconds if self.seconds else 0.0

    @property
    def rest_seconds(self) -> float:
        """The seconds left until the deadline; 0 without a deadline."""
        return max(self.ends - time.monotonic(), _LEAST_SECONDS) if self.ends else 0.0
