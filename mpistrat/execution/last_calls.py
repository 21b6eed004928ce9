"""Last calls: at the end of the program all communicators compare theirs, and refuse later ones, as in a forked child."""

from __future__ import annotations

import os
from weakref import WeakSet

from mpistrat import ending
from mpistrat.errors import UnavailableError
from mpistrat.execution.guard import Guard
from mpistrat.launch import abort
from mpistrat.transports.window import free_open_windows, is_freed_by_mpi
from mpistrat.watch import watcher

_guards: WeakSet[Guard] = WeakSet()


def watch(guard: Guard) -> None:
    """Take part in the end of the program: the communicator of this guard compares and refuses calls then."""
    _guards.add(guard)
    ending.watch_finalize()


def forget(guard: Guard) -> None:
    """Do nothing more with a guard whose communicator is closed: its groups are freed."""
    _guards.discard(guard)


def _before_finalize() -> None:
    _refuse("the program has called MPI_Finalize; do that after the last collective")


def _after_end() -> bool:
    """Refuse later calls, and return whether no thread is in one: a daemon's would read windows that are freed."""
    guards = list(_guards)
    _refuse("the programs of all ranks have ended: this exit handler is called too late; register it after the first strategy")
    return not any(guard.thread.is_locked() for guard in guards)


def _free_windows(are_idle: bool) -> None:
    if are_idle:
        free_open_windows()
    elif not is_freed_by_mpi():  # the job would wait in MPI_Finalize for ever
        why = "the program has ended while a thread of some rank is in a collective: stop such threads, and join them, first"
        abort.end(UnavailableError(why))


def _refuse(why: str) -> None:
    for guard in list(_guards):
        guard.refuse_from_now_on(why)
    _guards.clear()


def _confirm() -> None:
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


ending.at(ending.Stage.COMPARE, _confirm)
ending.at(ending.Stage.REFUSE, _before_finalize)
watcher.after_end.append((_after_end, _free_windows))
os.register_at_fork(after_in_child=_refuse_in_child)
