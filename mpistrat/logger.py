"""The logger ``mpistrat``: what the library tells the user without being asked, on stderr unless the program says otherwise.

Its level is INFO, and it does not propagate to the root logger: a stall report must be seen in every program, also in one that
hides or captures what others log. A program that wants its records elsewhere replaces its handlers, or sets ``propagate``.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["logger"]


class _StderrHandler(logging.Handler):
    """Writes a record to what ``sys.stderr`` is at that time, in one call: lines of several ranks do not interleave."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write("".join(f"mpistrat: {line}\n" for line in self.format(record).splitlines()))
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


logger = logging.getLogger("mpistrat")
# what the program has configured before it imported this library holds
if not logger.handlers:
    logger.addHandler(_StderrHandler())
    logger.propagate = False
if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
