"""The logger ``mpistrat``: warnings and reports of the library, on stderr unless the program configures other handlers.

Its level is INFO, and it does not propagate to the root logger: a stall report must be seen in every program, also in one that
hides or captures what others log. A program that wants its records elsewhere replaces its handlers, or sets ``propagate``.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO


class StderrHandler(logging.Handler):
    """Writes to a stream, by default stderr, in one call, so that lines of several ranks do not interleave."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.stream = stream

    def say(self, text: str) -> None:
        """Write a text, such as why this rank ends the job."""
        stream = self.stream or sys.stderr
        stream.write(text)
        stream.flush()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.say("".join(f"mpistrat: {line}\n" for line in self.format(record).splitlines()))
        except Exception:
            self.handleError(record)


logger = logging.getLogger("mpistrat")
stderr = StderrHandler()
_warned: set[str] = set()
# what the program has configured before it imported this library holds
if not logger.handlers:
    logger.addHandler(stderr)
    logger.propagate = False
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)


def warn_once(key: str, text: str) -> None:
    """Log a warning, unless this process has logged one with the same key."""
    if key not in _warned:
        _warned.add(key)
        logger.warning(text)
