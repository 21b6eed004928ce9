"""Call: a collective call of this rank: what it is, its deadline, and what was noted before it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mpistrat.groups.agreement import Signature, notes_text

_LEAST_SECONDS = 0.2  # a call that all ranks entered just before the deadline still gets this long


@dataclass
class Call:
    """A numbered call of a verb, with its arguments."""

    number: int
    verb: str
    signature: Signature
    seconds: float = 0.0  # the deadline, from the beginning of the call; 0 means none
    is_started: bool = False
    ends: float = 0.0  # on the clock of `time.monotonic`; 0: there is no deadline, or the call has not begun
    noted: int = 0  # hash of the notes that are compared with it
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"collective {self.number}, {self.signature.text}"

    @property
    def digest(self) -> int:
        """The hash of signature and notes."""
        return self.signature.digest ^ self.noted

    @property
    def text(self) -> str:
        """The call with its arguments, and with the notes before it that tell something."""
        return f"{self.signature.text}{notes_text(self.notes)}"

    def start_clock(self) -> None:
        """Start the clock of the deadline."""
        self.ends = time.monotonic() + self.seconds if self.seconds else 0.0

    @property
    def rest_seconds(self) -> float:
        """The seconds left until the deadline; 0 without a deadline."""
        return max(self.ends - time.monotonic(), _LEAST_SECONDS) if self.ends else 0.0
