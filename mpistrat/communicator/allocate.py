"""Memory for what a collective call works on: where one rank has none, the others must not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.errors import TransportError

__all__ = ["allocate", "no_memory"]

T = TypeVar("T")


def allocate(guard: CollectiveGuard, rank: int, make: Callable[[], T], verb: str = "all_reduce") -> T:
    """Return what `make` allocates for the call of `verb` that this rank is in.

    Raises
    ------
    TransportError
        If there is no memory; the other ranks are notified, and no further collective can be made.
    """
    try:
        return make()
    except MemoryError as error:
        raise no_memory(guard, rank, error, verb) from None


def no_memory(guard: CollectiveGuard, rank: int, error: MemoryError, verb: str = "all_reduce") -> TransportError:
    """Tell the other ranks that this one has no memory for a call, and return the error to raise."""
    guard.give_up()
    guard.fail(verb, error)
    return TransportError(
        f"rank {rank}: no memory for the results ({error}); pass out=, or smaller arrays, or free some of "
        "CuPy's: cupy.get_default_memory_pool().free_all_blocks()"
    )
