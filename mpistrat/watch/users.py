"""Which stack frames are the user's own: not those of this library, of installed packages, or of Python."""

from __future__ import annotations

import gc
import os
import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

__all__ = ["collection_paused", "innermost", "is_ours"]

# standard-library modules that may lie on the stack between the program and this library
_BETWEEN = ("threading", "contextlib")


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector while frames of another thread are looked at.

    Before Python 3.12 that may collect garbage, and a finalizer may let the other thread go on, whose frame is gone then.
    """
    if sys.version_info < (3, 12) and gc.isenabled():
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
    else:
        yield


def innermost(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's program; if everything is installed, the innermost that is not ours."""
    other = None
    while frame is not None:
        if not is_ours(frame):
            if not _is_installed(frame.f_code.co_filename):
                return frame
            other = other or frame
        frame = frame.f_back
    return other


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame belongs to this library; its commands count as programs that use it."""
    name = str(frame.f_globals.get("__name__", ""))
    return name in _BETWEEN or (name.partition(".")[0] == "mpistrat" and not name.startswith("mpistrat.tools."))


@cache
def _is_installed(filename: str) -> bool:
    return filename.startswith(("<frozen", *_folders()))


@cache
def _folders() -> tuple[str, ...]:
    return tuple(f"{place}/" for place in [Path(os.__file__).parent, *site.getsitepackages()])
