"""What mpiexec and its ranks print to stderr, handed on at once; Open MPI's banners of an aborted job come last, each once.

Open MPI prints such a banner when a rank has called MPI_Abort, and may do so before that rank's traceback. It also ends its
messages with a NUL byte, for which grep takes a whole log to be binary.
"""

from __future__ import annotations

import os
import re
import select
from contextlib import suppress

__all__ = ["Banners", "relay"]

# what mpiexec puts before each line of a rank with its option for that
_TAG = rb"(?:\[[\d,]+\]<stderr>: ?)?"
_LINE = b"-" * 74 + b"\n"
_KIND = rb"(?P<kind>MPI_ABORT was invoked|\w+ has exited due to process rank)"
_BANNER = re.compile(_TAG + _LINE + _TAG + _KIND + rb".*?\n" + _TAG + _LINE, re.DOTALL)
# what may become a banner when more arrives: dashes; or a line of them, and the beginning of the next line, or of the text
_BEGINNING = re.compile(_TAG + rb"(?:-{1,74}|" + _LINE + _TAG + rb"(?:[\w ]{0,40}|" + _KIND + rb".*))\Z", re.DOTALL)
_NUL = re.compile(_TAG + rb"\0")

_READ_BYTES = 1 << 16
# how long what may be the beginning of a banner waits for the rest
_PATIENCE_SECONDS = 0.1


class Banners:
    """Hold back the banners of an aborted job until its end, and forward everything else."""

    def __init__(self) -> None:
        self._undecided = b""
        self._held: dict[bytes, bytes] = {}
        self._has_message = False

    @property
    def is_undecided(self) -> bool:
        """Whether the last bytes may be the beginning of a banner."""
        return bool(self._undecided)

    def feed(self, data: bytes) -> bytes:
        """Return what is to be printed after these bytes have arrived."""
        data = self._undecided + data
        if not data.endswith(b"-") and _LINE not in data:  # nearly always, and much faster than what follows
            self._undecided = b""
            return self._without_nul(data)
        # MPI_ABORT's own is printed once for each rank that calls it: the first is the one to read
        for banner in _BANNER.finditer(data):
            self._held.setdefault(banner["kind"], banner[0])
        data = _BANNER.sub(b"", data)
        beginning = _BEGINNING.search(data)
        end = beginning.start() if beginning else len(data)
        self._undecided = data[end:]
        return self._without_nul(data[:end])

    def give_up(self) -> bytes:
        """Return the undecided bytes: the rest of a banner would have come by now."""
        data, self._undecided = self._undecided, b""
        return self._without_nul(data)

    def end(self) -> bytes:
        """Return what is left when there is no more: undecided bytes, then the banners."""
        return self.give_up() + b"".join(self._held.values())

    def _without_nul(self, data: bytes) -> bytes:
        # only messages of mpiexec have a line of dashes before; what a program prints otherwise stays as it is
        self._has_message |= bool(self._held) or _LINE in data
        return _NUL.sub(b"", data) if self._has_message and b"\0" in data else data


def relay(source: int, target: int) -> None:
    """Copy bytes as they arrive, until there are no more or nobody reads them, and let `Banners` put banners last.

    Parameters
    ----------
    source, target : int
        File descriptors. `source` is closed, so that its writers see if nobody reads `target`.
    """
    banners = Banners()
    with suppress(OSError), os.fdopen(source, "rb", buffering=0) as stream:
        while True:
            if banners.is_undecided and not select.select([stream], [], [], _PATIENCE_SECONDS)[0]:
                _write(target, banners.give_up())
            data = stream.read(_READ_BYTES)
            if not data:
                break
            _write(target, banners.feed(data))
        _write(target, banners.end())


def _write(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:  # mpiexec sets its stdout to non-blocking, which may be the same terminal
            select.select([], [target], [])
