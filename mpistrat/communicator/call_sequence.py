"""CallSequence: begins collective calls: numbers them, checks their arguments, and compares them with those of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from mpistrat import settings
from mpistrat.communicator.call import CollectiveCall
from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.errors import MpistratError

__all__ = ["CallSequence", "Facts"]

Facts = np.ndarray[Any, np.dtype[np.int64]]
"""Two numbers of each rank: int64, (ranks, 2)."""

_MERGED_KEPT = 64


class CallSequence:
    """The collective calls of this rank on one communicator.

    Parameters
    ----------
    guard : CollectiveGuard
        Compares the calls of all ranks.
    options : CommunicationOptions
        Defaults for every call.

    Attributes
    ----------
    options : CommunicationOptions
        As given.
    is_strict : bool
        Whether every call is compared before it returns, including what could be compared later.
    """

    def __init__(self, guard: CollectiveGuard, options: CommunicationOptions) -> None:
        self._guard, self.options, self.is_strict = guard, options, settings.STRICT.read()
        self._merged: dict[CommunicationOptions, CommunicationOptions] = {}

    def enter(
        self,
        verb: str,
        arguments: Callable[[CommunicationOptions], str],
        options: CommunicationOptions | None,
        check: Callable[[CommunicationOptions], None] | None = None,
        facts: Callable[[], tuple[int, int]] | None = None,
    ) -> tuple[CollectiveCall, Facts]:
        """Begin a call: check its arguments, compare it on all ranks, and exchange facts. A collective call.

        Parameters
        ----------
        verb : str
            Name of the collective.
        arguments : callable
            Returns, for the merged options, the arguments that must be the same on all ranks, as text.
        options : CommunicationOptions or None
            Of the call.
        check : callable, optional
            Raises if this rank cannot make the call with the merged options.
        facts : callable, optional
            Returns two numbers that the other ranks need.
        """
        call, refused = self.prepare(verb, arguments, options, check)
        call.begin()
        if refused is not None:
            self.refuse(call, refused)
        return call, self._guard.agree(call, None, (0, 0) if facts is None else facts())

    def prepare(
        self,
        verb: str,
        arguments: Callable[[CommunicationOptions], str],
        options: CommunicationOptions | None,
        check: Callable[[CommunicationOptions], None] | None = None,
    ) -> tuple[CollectiveCall, Exception | None]:
        """Return a numbered call, and the error of its arguments if this rank refuses them: see `enter`."""
        wanted, refused = self.options, None
        try:
            check_options(options)
            wanted = self.options if options is None else self._merge(options)
            if check is not None:
                check(wanted)
        except (MpistratError, TypeError) as error:
            refused = error
        return self._next(verb, lambda: verb + arguments(wanted), wanted), refused

    def prepare_text(self, text: str, options: object) -> CollectiveCall:
        """Return a numbered call described by a text; invalid `options` are ignored, since the call itself refuses them."""
        wanted = self._merge(options) if isinstance(options, CommunicationOptions) else self.options
        call = self._next(text.partition("(")[0], lambda: text, wanted)
        call.begin()
        return call

    def refuse(self, call: CollectiveCall, error: Exception) -> NoReturn:
        """Raise the error of a call that this rank cannot make; with MPISTRAT_STRICT all ranks raise together."""
        if self.is_strict:
            self._guard.agree(call, error)
        self._guard.number -= 1  # the other ranks have not made the call, or wait in it for this one
        self._guard.refuse(call, error)

    def _next(self, verb: str, describe: Callable[[], str], options: CommunicationOptions) -> CollectiveCall:
        self._guard.number += 1
        call = CollectiveCall(self._guard.number, verb, describe, options)
        self._guard.take_notes(call)
        return call

    def _merge(self, options: CommunicationOptions) -> CommunicationOptions:
        """Return options merged over the communicator's; merging is slow, so results are cached."""
        if options not in self._merged:
            if len(self._merged) == _MERGED_KEPT:
                self._merged.clear()
            self._merged[options] = self.options.merge(options)
        return self._merged[options]
