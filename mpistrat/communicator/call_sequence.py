"""CallSequence: the way into a collective call: it gets a number, is checked here, and compared with those of other ranks."""

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
"""Two numbers of each rank: (ranks, 2)."""

_MERGED_KEPT = 64


class CallSequence:
    """The collective calls that this rank makes through one communicator.

    Parameters
    ----------
    guard : CollectiveGuard
        Compares them.
    options : CommunicationOptions
        Hold for every call that does not say otherwise.

    Attributes
    ----------
    options : CommunicationOptions
        As given.
    is_strict : bool
        Whether everything is compared before a result is handed out, also what could wait for a later call.
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
        """Begin a call: check it here, meet the others, compare the calls of all, and learn their facts. A collective call.

        Parameters
        ----------
        verb : str
            What the call does.
        arguments : callable
            Returns, for the options that hold, what all ranks must pass alike, in words.
        options : CommunicationOptions or None
            Those of the call.
        check : callable, optional
            Raises where this rank cannot make the call with the options that hold.
        facts : callable, optional
            Returns what the other ranks must know of this one.
        """
        call, refused = self.announce(verb, arguments, options, check)
        call.begin()
        if refused is not None:
            self.refuse(call, refused)
        return call, self._guard.agree(call, None, (0, 0) if facts is None else facts())

    def announce(
        self,
        verb: str,
        arguments: Callable[[CommunicationOptions], str],
        options: CommunicationOptions | None,
        check: Callable[[CommunicationOptions], None] | None = None,
    ) -> tuple[CollectiveCall, Exception | None]:
        """Return a call with its number, and why this rank cannot make it, as far as can be told here: see `enter`."""
        wanted, refused = self.options, None
        try:
            check_options(options)
            wanted = self.options if options is None else self._merge(options)
            if check is not None:
                check(wanted)
        except (MpistratError, TypeError) as error:
            refused = error
        return self._next(verb, lambda: verb + arguments(wanted), wanted), refused

    def announce_text(self, text: str, options: object) -> CollectiveCall:
        """Return a call that is described by a text; `options` may not have been checked, the call itself refuses them."""
        wanted = self._merge(options) if isinstance(options, CommunicationOptions) else self.options
        call = self._next(text.partition("(")[0], lambda: text, wanted)
        call.begin()
        return call

    def refuse(self, call: CollectiveCall, error: Exception) -> NoReturn:
        """Raise the error of a call that this rank cannot make; with MPISTRAT_STRICT all ranks raise together."""
        if self.is_strict:
            self._guard.agree(call, error)
        self._guard.number -= 1  # the others have made none, or wait for this rank to make it
        self._guard.refuse(call, error)

    def _next(self, verb: str, describe: Callable[[], str], options: CommunicationOptions) -> CollectiveCall:
        self._guard.number += 1
        call = CollectiveCall(self._guard.number, verb, describe, options)
        self._guard.take_notes(call)
        return call

    def _merge(self, options: CommunicationOptions) -> CommunicationOptions:
        """Return options merged over ours; merging is slow, so the last few are kept."""
        if options not in self._merged:
            if len(self._merged) == _MERGED_KEPT:
                self._merged.clear()
            self._merged[options] = self.options.merge(options)
        return self._merged[options]
