"""CallSequence: begins collective calls: numbers them, checks their arguments, and compares them with those of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from mpistrat.communicator.call import CollectiveCall
from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError, MpistratError

Facts = np.ndarray[Any, np.dtype[np.int64]]
"""Two numbers of each rank: int64, (ranks, 2)."""


class CallSequence:
    """The collective calls of this rank on one communicator."""

    def __init__(self, guard: CollectiveGuard, options: CommunicationOptions, is_strict: bool) -> None:
        self._guard, self.options, self.is_strict = guard, options, is_strict

    def enter(
        self,
        verb: str,
        arguments: Callable[[CommunicationOptions], str],
        options: CommunicationOptions | None,
        check: Callable[[CommunicationOptions], None] | None = None,
        facts: Callable[[], tuple[int, int]] | None = None,
    ) -> tuple[CollectiveCall, Facts]:
        """Begin a call: check its arguments, compare it on all ranks, and exchange facts. A collective call.

        `arguments` returns, for the merged options, what must be the same on all ranks, as text; `check` raises if this rank
        cannot make the call with them; `facts` returns two numbers that the other ranks need.
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
            wanted = self.options.merge(options)
            if check is not None:
                check(wanted)
        except (MpistratError, TypeError) as error:
            refused = error
        return self._next(verb, lambda: verb + arguments(wanted), wanted), refused

    def prepare_text(self, text: str, options: object) -> CollectiveCall:
        """Return a numbered call described by a text; invalid `options` are ignored, since the call itself refuses them."""
        wanted = self.options
        if isinstance(options, CommunicationOptions):
            with suppress(InvalidArgumentError):  # they may contradict those of the communicator
                wanted = self.options.merge(options)
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
