"""The exit code that this process is about to end with, available to its exit handlers.

Python calls no hook for an uncaught SystemExit: the interpreter reads its ``code`` and ends. So this module replaces that
attribute by a property, which recognises the interpreter because it reads without a Python frame below it. Before Python 3.12
an uncaught ``sys.exit`` creates no exception object at all; it is replaced by a function that raises one.
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
    """Record from now on the code of an uncaught SystemExit; a second call changes nothing."""
    if sys.exit is not _original_exit or sys.implementation.name != "cpython":
        return
    members: dict[str, Any] = gc.get_referents(SystemExit.__dict__)[0]  # the dict behind the read-only proxy
    member = members["code"]

    def read(error: SystemExit) -> object:
        code: object = member.__get__(error)
        if _is_read_by_interpreter():
            _codes.append(as_exit_code(code))
        return code

    members["code"] = property(read, member.__set__, member.__delete__, member.__doc__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
    sys.exit = _exit
    main = vars(sys.modules["__main__"])  # a script that says `from sys import exit`
    main.update({name: _exit for name, value in main.items() if value is _original_exit})


def ending_code() -> int:
    """Return the exit code of the process, once its main program has ended: 0 if it has succeeded."""
    if _codes:
        return _codes[-1]
    return int(getattr(sys, "last_value", None) is not None)


def as_exit_code(code: object) -> int:
    """Return the exit status of ``sys.exit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def flush_output() -> None:
    """Flush stdout and stderr, before an exit in which Python does not do so."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # it is None, or closed
            stream.flush()


def _is_read_by_interpreter() -> bool:
    try:
        sys._getframe(2)  # the caller of the property
    except ValueError:
        return True
    return False


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status), as the ``sys.exit`` that it replaces does."""
    if isinstance(status, SystemExit):
        raise status
    raise SystemExit(*status) if isinstance(status, tuple) else SystemExit(status)
