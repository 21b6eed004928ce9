"""Threads: which one makes the collective calls of a communicator, so that ranks can compare that too.

Threads have no order that is the same on all ranks. So a change from the main thread to another one, or back, is noted, and
compared with the next call, with what `label` says of the other one. There is one other thread at a time, the next when it has
ended.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from types import FrameType

from mpistrat.watch.recorder import recorder

_POOLS = ("ThreadPoolExecutor", "asyncio", "Dummy")  # names of threads, as the standard library begins them


class _Own(threading.local):
    """What each thread has for itself: the list from which it takes an element for a call, and which gets it back."""

    def __init__(self) -> None:
        self.free: list[None] = []  # of threads that have not made the last call: never anything


class CallingThread:
    """The thread that made the last call, and the lock of calls.

    The lock is a list, ``own.free`` of that thread alone, which has an element while no call is under way. To take it tells at
    once, in a third of the time of a `threading.Lock`, that the lock is free and that it is this thread.
    """

    def __init__(self) -> None:
        self.own = _Own()
        self._free: list[None] = [None]
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self.own.free = self._free
        # of the threads but the main one: which makes calls, and which were there when it made its first one
        self._other: threading.Thread | None = None
        self._beside: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._recorder = recorder()
        self._recorder.note_thread(id(self))
        weakref.finalize(self, self._recorder.forget_thread, id(self)).atexit = False

    def is_this(self) -> bool:
        """Return whether it is the current one."""
        return self.own.free is self._free

    def lock(self) -> bool:
        """Lock for the current thread; return whether no thread was in a call."""
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def unlock(self) -> None:
        """Let the next call begin."""
        self._free.append(None)

    def is_locked(self) -> bool:
        """Return whether a thread is in a call."""
        return not self._free

    def refusal(self) -> str:
        """Return why the current thread may not make calls now, or an empty text."""
        now, other = threading.current_thread(), self._other
        if now in (threading.main_thread(), other) or other is None or not (other.is_alive() or now in self._beside):
            return ""
        return (
            f"thread {now.name!r} makes one, and so does thread {other.name!r}, which ranks cannot tell apart. "
            "Make all collectives of a strategy on one thread, or give each a strategy or Communicator of its own"
        )

    def change(self) -> str:
        """Make the current thread, which has locked, the one that makes calls; return what ranks compare of that, or ''."""
        now, was_main = threading.current_thread(), self._is_main
        self._is_main = now is threading.main_thread()
        self.own.free = self._free = []  # nothing comes back to the list of the thread before
        self._recorder.note_thread(id(self))
        if self._is_main:
            return "" if was_main else "a change to the main thread"
        if now is self._other and not was_main:
            return ""
        if now is not self._other:
            self._other, self._beside = now, weakref.WeakSet(threading.enumerate())
        return f"a change to thread {label(now)}"


def label(thread: threading.Thread) -> str:
    """Return what tells a thread from others, equal on ranks that make their threads alike: its name, but for numbers.

    Numbers may be those of ranks, or count threads that other ranks do not have. What counts is which of the threads with such
    names it is; of pools, which threads may share, and of threads that other libraries make, not even that.
    """
    numbers = re.compile(r"\d+")
    kind = numbers.sub("#", thread.name)
    if kind.startswith(_POOLS):
        return repr(kind)
    alike = sorted(tuple(map(int, numbers.findall(each.name))) for each in _threads() if numbers.sub("#", each.name) == kind)
    return f"{kind!r} ({alike.index(tuple(map(int, numbers.findall(thread.name)))) + 1})"


def is_within_call() -> bool:
    """Return whether the program makes this call within another one: in a signal handler, a finalizer or a callback."""
    frame: FrameType | None = sys._getframe(2)
    has_left = False
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if has_left and name.startswith(("mpistrat.communicator", "mpistrat.execution", "mpistrat.transports")):
            return True
        has_left = has_left or not name.startswith("mpistrat.")
        frame = frame.f_back
    return False


def _threads() -> list[threading.Thread]:
    """Return the threads that run, or have not been started: those are in a private set of the interpreter alone."""
    known = getattr(threading, "_dangling", None)  # a WeakSet; its references are copied at once, as other threads add to it
    every = threading.enumerate() if known is None else [each for ref in known.data.copy() if (each := ref()) is not None]
    return [each for each in every if each.is_alive() or each.ident is None]
