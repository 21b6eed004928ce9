"""Lifetime: the end of the program, the end of MPI, and forks, as the guards of all communicators of this process see them."""

from __future__ import annotations

import atexit
import os
import weakref
from functools import cache
from typing import Protocol

from mpistrat.launch import exit_code, finalize

__all__ = ["follow"]


class _Guard(Protocol):
    communicator: int

    def confirm_at_exit(self) -> None: ...

    def refuse_from_now_on(self, why: str) -> None: ...

    def refuse_in_child(self) -> None: ...


_guards: weakref.WeakSet[_Guard] = weakref.WeakSet()


def follow(guard: _Guard) -> None:
    """Have a guard compare its last calls at the end, and refuse all after MPI_Finalize and in a forked child."""
    _guards.add(guard)
    _watch_finalize()


@cache
def _watch_finalize() -> None:
    finalize.call_before(_before_finalize)


def _before_finalize() -> None:
    _confirm_at_exit()
    for guard in list(_guards):
        guard.refuse_from_now_on("the program has called MPI_Finalize; do that after the last collective")


def _confirm_at_exit() -> None:
    if exit_code.ending_code() == 0:
        for guard in sorted(_guards, key=lambda guard: guard.communicator):
            guard.confirm_at_exit()


def _refuse_in_child() -> None:
    for guard in list(_guards):
        guard.refuse_in_child()


atexit.register(_confirm_at_exit)
os.register_at_fork(after_in_child=_refuse_in_child)
