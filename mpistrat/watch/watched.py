"""Record collectives over all ranks that no communicator makes, such as creating a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpistrat.watch.recorder import recorder

__all__ = ["watched"]

_WORLD = 0
_numbers = iter(range(2**62))


@contextmanager
def watched(text: str) -> Iterator[None]:
    """Record a collective over all ranks that no communicator makes.

    Parameters
    ----------
    text : str
        The call, the same text on all ranks.
    """
    mine = recorder()
    slot = mine.enter(_WORLD, next(_numbers), mine.intern(text.partition("(")[0], "", "", 0, "", text))
    try:
        yield
    except BaseException:
        mine.fail(slot)
        raise
    mine.leave(slot)
