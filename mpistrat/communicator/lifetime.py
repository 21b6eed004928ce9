"""Lifetime: the end of the program, the end of MPI, and forks, as the guards of all communicators of this process see them."""

from __future__ import annotations

import os
import weakref
from functools import cache
from typing import Protocol

from mpistrat.launch import abort
from mpistrat.transports.window import free_open_windows
from mpistrat.watch import watcher


class _Guard(Protocol):
    communicator: int

    def is_broken(self) -> bool: ...

    def confirm(self) -> None: ...

    def refuse_from_now_on(self, why: str) -> None: ...

    def refuse_in_child(self) -> None: ...


_guards: weakref.WeakSet[_Guard] = weakref.WeakSet()


def follow(guard: _Guard) -> None:
    """Have a guard compare its last calls at the end, and refuse all after MPI_Finalize and in a forked child."""
    _guards.add(guard)
    _watch_finalize()


def forget(guard: _Guard) -> None:
    """Do nothing more with a guard whose communicator is closed: its groups are freed."""
    _guards.discard(guard)


@cache
def _watch_finalize() -> None:
    abort.before_finalize(_before_finalize)


def _before_finalize() -> None:
    _confirm_at_exit()
    _refuse("the program has called MPI_Finalize; do that after the last collective")


def _after_end() -> None:
    _refuse("the programs of all ranks have ended: this exit handler is called too late; register it after the first strategy")
    free_open_windows()


def _refuse(why: str) -> None:
    for guard in list(_guards):
        guard.refuse_from_now_on(why)
    _guards.clear()


def _confirm_at_exit() -> None:
    if abort.ending_code() == 0:
        try:
            for guard in sorted(_guards, key=lambda guard: guard.communicator):
                if not guard.is_broken():
                    guard.confirm()
        except Exception as error:
            abort.end(error)


def _refuse_in_child() -> None:
    for guard in list(_guards):
        guard.refuse_in_child()


watcher.call_before_end(_confirm_at_exit)
watcher.call_after_end(_after_end)
os.register_at_fork(after_in_child=_refuse_in_child)
