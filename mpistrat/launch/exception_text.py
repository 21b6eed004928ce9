"""What a rank prints of an uncaught exception: its traceback, from the user's script to the user's last line."""

from __future__ import annotations

import traceback
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpistrat import settings
from mpistrat.errors import MpistratError, SettingError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["format_exception"]

_PACKAGE = Path(__file__).parents[1]
_HINT = "  (frames inside mpistrat are left out; MPISTRAT_TRACEBACK=full shows them)\n"


def format_exception(error: BaseException, label: str) -> str:
    """Return the traceback of an exception, beginning with the user's script, each line prefixed by ``[label]``.

    Frames of this library are left out, unless MPISTRAT_TRACEBACK is ``full``. An error that the library did not raise by a
    ``raise`` statement, a TypeError for example, may be a bug in it: then all frames are shown.
    """
    text = traceback.TracebackException(type(error), error, _without_runner(error.__traceback__))
    is_folded = False if _wants_all() or _may_be_bug(error, text) else _fold(text)
    chunks, last = list(text.format()), len(list(text.format_exception_only()))
    if is_folded:  # the error stays the last thing to read
        chunks.insert(len(chunks) - last, _HINT)
    return "".join(f"[{label}] {line}\n" for line in "".join(chunks).splitlines())


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None and _is_runner(trace.tb_frame.f_globals):
        trace = trace.tb_next
    return trace


def _is_runner(module: dict[str, Any]) -> bool:
    return module.get("__name__") == "runpy" or module.get("__package__") == "mpi4py"


def _wants_all() -> bool:
    try:
        return settings.TRACEBACK.read() == "full"
    except SettingError:
        return True


def _may_be_bug(error: BaseException, text: traceback.TracebackException) -> bool:
    if isinstance(error, MpistratError) or not text.stack:
        return False
    innermost = text.stack[-1]
    return _is_ours(innermost) and not (innermost.line or "").startswith("raise")


def _fold(text: traceback.TracebackException | None) -> bool:
    """Leave out frames of this library, also of causes; return whether there were any."""
    if text is None:
        return False
    others = [frame for frame, next_frame in pairwise([*text.stack, None]) if frame and not _is_ours(frame, next_frame)]
    is_folded = 0 < len(others) < len(text.stack)
    if is_folded:
        text.stack[:] = others
    causes = [_fold(text.__cause__), _fold(text.__context__)]
    return is_folded or any(causes)


def _is_ours(frame: traceback.FrameSummary, next_frame: traceback.FrameSummary | None = None) -> bool:
    if frame.filename == "<string>" and next_frame is not None:  # what a dataclass generates
        return _is_ours(next_frame)
    path = Path(frame.filename)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "tools")
