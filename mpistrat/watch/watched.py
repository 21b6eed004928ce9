"""Record collectives that no communicator makes, such as creating a strategy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from zlib import crc32

from mpistrat.watch.recorder import recorder

__all__ = ["watched"]

_SOME_RANKS = 1 << 63  # begins the numbers of groups that have no communicator yet; those of communicators are lower
_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)


@contextmanager
def watched(text: str, members: str = "") -> Iterator[None]:
    """Record a collective that no communicator makes.

    Parameters
    ----------
    text : str
        The call, the same text on all ranks.
    members : str
        The ranks of the job that take part, as text; empty for all.
    """
    mine = recorder()
    communicator = _SOME_RANKS | crc32(members.encode()) if members else 0
    index = mine.intern(text.partition("(")[0], "", "", 0, "", text, ranks=members)
    slot = mine.enter(communicator, next(_numbers[members]), index)
    try:
        yield
    except BaseException:
        mine.fail(slot)
        raise
    mine.leave(slot)
