"""Which frames are the user's own: neither this library's, nor one that is installed, nor Python's."""

from __future__ import annotations

import site
import sysconfig
from functools import cache
from types import FrameType

__all__ = ["innermost"]


def innermost(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's program on a stack; where all is installed, the innermost that is not ours."""
    other = None
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != "mpistrat" or name.startswith("mpistrat.tools."):
            if not _is_installed(frame.f_code.co_filename):
                return frame
            other = other or frame
        frame = frame.f_back
    return other


@cache
def _is_installed(filename: str) -> bool:
    return filename.startswith(("<frozen", *_folders()))


@cache
def _folders() -> tuple[str, ...]:
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(f"{place}/" for place in [*places, *site.getsitepackages()] if place)
