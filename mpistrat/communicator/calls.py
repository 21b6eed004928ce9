"""Calls: begins the collective calls of a communicator: merges their options, checks their arguments, and has them compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError, MpistratError
from mpistrat.execution.guard import Call, Guard


class Calls:
    """The collective calls of this rank on one communicator."""

    def __init__(self, guard: Guard, options: CommunicationOptions, is_strict: bool) -> None:
        self._guard, self.options, self.is_strict = guard, options, is_strict

    def compare(
        self,
        verb: str,
        arguments: Callable[[CommunicationOptions], str],
        options: CommunicationOptions | None,
    ) -> None:
        """Begin a call, and compare it on all ranks. A collective call."""
        call, _ = self.begin(verb, arguments, options)
        self._guard.agree(call)

    def begin(
        self,
        verb: str,
        arguments: Callable[[CommunicationOptions], str],
        options: CommunicationOptions | None,
        check: Callable[[CommunicationOptions], None] | None = None,
    ) -> tuple[Call, CommunicationOptions]:
        """Return a numbered call that has begun, and its merged options; raise if this rank cannot make it.

        `arguments` returns, for the merged options, what must be the same on all ranks, as text; `check` raises if this rank
        cannot make the call with them.
        """
        call, wanted, refused = self.prepare(verb, arguments, options, check)
        call.start_clock()
        if refused is not None:
            self.refuse(call, refused)
        return call, wanted

    def prepare(
        self,
        verb: str,
        arguments: Callable[[CommunicationOptions], str],
        options: CommunicationOptions | None,
        check: Callable[[CommunicationOptions], None] | None = None,
    ) -> tuple[Call, CommunicationOptions, Exception | None]:
        """Return what `begin` does, before the call begins, and the error of its arguments if this rank refuses them."""
        wanted, refused = self.options, None
        try:
            wanted = self.options.merge(options)
            if check is not None:
                check(wanted)
        except (MpistratError, TypeError) as error:
            refused = error
        return self._guard.next_call(verb, verb + arguments(wanted), wanted.timeout_seconds or 0.0), wanted, refused

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
