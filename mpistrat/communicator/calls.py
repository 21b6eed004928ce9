"""Calls: begins the collective calls of a communicator: merges their options, checks their arguments, and has them compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError, MpistratError
from mpistrat.execution.guard import Call, Guard

T = TypeVar("T")


class Calls:
    """The collective calls of this rank on one communicator."""

    def __init__(self, guard: Guard, options: CommunicationOptions, is_strict: bool) -> None:
        self._guard, self.options, self.is_strict = guard, options, is_strict

    def begin(
        self,
        verb: str,
        options: CommunicationOptions | None,
        ask: Callable[[CommunicationOptions], T],
        check: Callable[[T], None] | None = None,
    ) -> tuple[Call, T]:
        """Return a numbered call that has begun, and what it asks for; raise if this rank cannot make it.

        `ask` returns that for the merged options: its text must be the same on all ranks. `check` raises if this rank cannot
        make the call.
        """
        call, asked, refused = self.prepare(verb, options, ask, check)
        call.start_clock()
        if refused is not None:
            self.refuse(call, refused)
        return call, asked

    def prepare(
        self,
        verb: str,
        options: CommunicationOptions | None,
        ask: Callable[[CommunicationOptions], T],
        check: Callable[[T], None] | None,
    ) -> tuple[Call, T, Exception | None]:
        """Return what `begin` does, before the call begins, and the error of its arguments if this rank refuses them."""
        wanted: CommunicationOptions = self.options
        asked: T | None = None
        refused: Exception | None = None
        try:
            wanted = self.options.merge(options)
            asked = ask(wanted)
            if check is not None:
                check(asked)
        except (MpistratError, TypeError) as error:
            refused = error
        asked = ask(wanted) if asked is None else asked
        return self._guard.next_call(verb, f"{verb}{asked}", wanted.timeout_seconds or 0.0), asked, refused

    def prepare_text(self, text: str, options: object) -> Call:
        """Return a numbered call described by a text; invalid `options` are ignored, since the call itself refuses them."""
        wanted = self.options
        if isinstance(options, CommunicationOptions):
            with suppress(InvalidArgumentError):  # they may contradict those of the communicator
                wanted = self.options.merge(options)
        call = self._guard.next_call(text.partition("(")[0], text, wanted.timeout_seconds or 0.0)
        call.start_clock()
        return call

    def refuse(self, call: Call, error: Exception) -> NoReturn:
        """Raise the error of a call that this rank cannot make; with MPISTRAT_STRICT all ranks raise together."""
        if self.is_strict:
            self._guard.agree(call, error)
        self._guard.number -= 1  # the other ranks have not made the call, or wait in it for this one
        self._guard.refuse(call, error)
