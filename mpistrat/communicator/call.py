"""CollectiveCall: the description and the deadline of a collective call of this rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.groups.agreement import after

_LEAST_SECONDS = 0.2  # a call that all ranks entered just before the deadline still gets this long


@dataclass
class CollectiveCall:
    """The description and the deadline of a collective call."""

    number: int
    verb: str
    describe: Callable[[], str]
    options: CommunicationOptions
    is_started: bool = False
    ends: float = 0.0  # on the clock of `time.monotonic`; 0: there is no deadline, or the call has not begun
    noted: int = 0  # hash of the notes that are compared with it
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return f"collective {self.number}, {self.arguments}"

    @cached_property
    def arguments(self) -> str:
        """The call with its arguments."""
        return self.describe()

    @property
    def text(self) -> str:
        """The call with its arguments, and with the notes before it that tell something."""
        return f"{self.arguments}{after(self.notes)}"

    @property
    def seconds(self) -> float:
        """The deadline in seconds from the beginning of the call; 0 means none."""
        return self.options.timeout_seconds or 0.0

    def begin(self) -> None:
        """Start the clock of the deadline."""
        self.ends = time.monotonic() + self.seconds if self.seconds else 0.0

    @property
    def rest_seconds(self) -> float:
        """The seconds left until the deadline; 0 without a deadline."""
        return max(self.ends - time.monotonic(), _LEAST_SECONDS) if self.ends else 0.0
