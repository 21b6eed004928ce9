"""MPI_Finalize: what must happen before it, where the program calls it itself.

Otherwise mpi4py calls it after the interpreter's exit handlers have run, and Python cannot be called any more.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

__all__ = ["call_before"]

_calls: list[Callable[[], None]] = []
_keyvals: list[int] = []


def call_before(call: Callable[[], None]) -> None:
    """Have a function called at the beginning of MPI_Finalize; the one that was registered last is called first."""
    from mpi4py import MPI

    _calls.insert(0, call)
    if not _keyvals:  # MPI deletes the attributes of COMM_SELF before it does anything else
        _keyvals.append(MPI.Comm.Create_keyval(delete_fn=_call_all))
        MPI.COMM_SELF.Set_attr(_keyvals[0], None)
        atexit.register(_forget)


def _forget() -> None:
    """Call nothing at MPI_Finalize any more: the interpreter is about to shut down."""
    from mpi4py import MPI

    _calls.clear()
    while _keyvals and not MPI.Is_finalized():
        MPI.COMM_SELF.Delete_attr(_keyvals[0])
        MPI.Comm.Free_keyval(_keyvals.pop())


def _call_all(comm: object, keyval: int, value: object) -> None:
    calls = list(_calls)
    _calls.clear()
    for call in calls:
        call()
