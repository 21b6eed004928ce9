"""The exit code that this process is about to end with, known while it ends.

An uncaught SystemExit reaches no hook of Python's: the interpreter reads its ``code`` and ends. So that attribute is read
through a property that this module installs; the interpreter's reading has no Python frame below it. Before Python 3.12
``sys.exit`` makes no exception at all where nobody catches it, and is replaced by a function that raises one.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from typing import Any, NoReturn

__all__ = ["as_exit_code", "ending_code", "flush_output", "watch"]

_original_exit = sys.exit
_codes: list[int] = []


def watch() -> None:
    """Note from now on with which code an uncaught SystemExit ends the process; a second call changes nothing."""
    if sys.exit is not _original_exit or sys.implementation.name != "cpython":
        return
    members: dict[str, Any] = gc.get_referents(SystemExit.__dict__)[0]  # behind the proxy that cannot be written to
    member = members["code"]

    def read(error: SystemExit) -> object:
        code: object = member.__get__(error)
        if _is_asked_by_interpreter():
            _codes.append(as_exit_code(code))
        return code

    members["code"] = property(read, member.__set__, member.__delete__, member.__doc__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    sys.exit = _exit
    main = vars(sys.modules["__main__"])  # a script that says `from sys import exit`
    main.update({name: _exit for name, value in main.items() if value is _original_exit})


def ending_code() -> int:
    """Return the code that the process ends with, once its main program has ended: 0 where it has ended well."""
    if _codes:
        return _codes[-1]
    return int(getattr(sys, "last_value", None) is not None)


def as_exit_code(code: object) -> int:
    """Return what the operating system gets to see of ``sys.exit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def flush_output() -> None:
    """Write what was printed, for an end that Python itself does not see to."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()


def _is_asked_by_interpreter() -> bool:
    try:
        sys._getframe(2)  # beneath this function and the one that asks
    except ValueError:
        return True
    return False


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status), as the ``sys.exit`` that it replaces does."""
    if isinstance(status, SystemExit):
        raise status
    raise SystemExit(*status) if isinstance(status, tuple) else SystemExit(status)
