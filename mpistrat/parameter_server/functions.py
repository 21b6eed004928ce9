"""Functions, arguments, results and errors as bytes: what is sent once, and what with each call.

A function is pickled each time, with what it refers to then; the same bytes are sent once to each rank that runs it, and have a
number from then on. What is plain (arrays, numbers, texts and nests of them) goes by pickle, everything else by cloudpickle.
"""

from __future__ import annotations

import pickle
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from typing import Any

import numpy as np

from mpistrat.parameter_server.messages import REQUEST, Channel, Define, ForgetFunction

__all__ = ["FunctionTable", "SentFunction", "dumps", "dumps_error", "loads", "loads_error"]

_KEPT = 64
_PLAIN = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, type(None))
_DEPTH = 8

loads = pickle.loads


class SentFunction:
    """A function as bytes, which ranks have it, and the number by which it is called there."""

    def __init__(self, number: int, data: bytes, name: str) -> None:
        self.number, self.data, self.name = number, data, name
        self.ranks: set[int] = set()


class FunctionTable:
    """Sends each function once to each rank that runs it, and has it dropped when it can no longer be called."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._numbers = channel, count()
        self._by_digest: weakref.WeakValueDictionary[bytes, SentFunction] = weakref.WeakValueDictionary()
        self._recent: deque[SentFunction] = deque(maxlen=_KEPT)
        self._unused: deque[tuple[int, set[int]]] = deque()
        self._forgetting: list[Any] = []  # requests; no call waits for them, since a rank that is lost fails none
        self._lock = threading.Lock()

    def find(self, fn: Callable[..., Any]) -> SentFunction:
        """Return a function as it is sent, with what it refers to now."""
        name = getattr(fn, "__qualname__", repr(fn))
        if not callable(fn):
            raise TypeError(f"a function is scheduled, or called where a variable lives; got {fn!r}")
        data = dumps(fn, f"function {name}")
        digest = blake2b(data).digest()
        found = self._by_digest.get(digest)
        if found is None:
            found = SentFunction(next(self._numbers), data, name)
            weakref.finalize(found, self._unused.append, (found.number, found.ranks)).atexit = False
            self._by_digest[digest] = found
        self._recent.append(found)
        return found

    def send(self, function: SentFunction, rank: int) -> list[Any]:
        """Start to send a function to a rank, unless it has it; return the requests."""
        requests = []
        with self._lock:  # the thread beside the program sends, too
            while self._unused:
                number, ranks = self._unused.popleft()
                for other in ranks:
                    self._forgetting += self._channel.send(other, REQUEST, ForgetFunction(number))
            if self._forgetting:
                self._forgetting = self._channel.left(self._forgetting)
        if rank not in function.ranks:
            requests += self._channel.send(rank, REQUEST, Define(function.number), function.data)
            function.ranks.add(rank)
        return requests


def dumps(value: Any, what: str) -> bytes:
    """Return a value as bytes; errors call it `what`."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if _is_plain(value, _DEPTH) else _by_value(value)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be sent to another rank: {type(error).__name__}: {error}. What it refers to must be picklable: "
            "arrays, numbers, functions and classes are; open files, locks and threads are not"
        ) from error


def dumps_error(error: BaseException, name: str) -> bytes:
    """Return an error of the rank called `name` as bytes, with its traceback; its text serves where it cannot be loaded."""
    lines = "".join(f"[{name}] {line}\n" for line in "".join(traceback.format_exception(error)).splitlines())
    try:
        data = _by_value(error)
    except Exception:
        data = b""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its own `__str__` raises
        text = type(error).__name__
    return pickle.dumps((data, text, lines))


def loads_error(data: Any) -> BaseException:
    """Return an error that another rank raised, whose cause shows its traceback there."""
    pickled, text, lines = loads(data)
    try:
        error: BaseException = loads(pickled)
    except Exception:
        error = RuntimeError(text)
    error.__cause__ = _RemoteTracebackError(lines)
    return error


class _RemoteTracebackError(Exception):
    """Shows, as the cause of an error, where on another rank it was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _by_value(value: Any) -> bytes:
    import cloudpickle  # type: ignore[import-untyped] # an extra: `join_cluster` has found it

    data: bytes = cloudpickle.dumps(value)
    return data


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) is np.ndarray:
        return not value.dtype.hasobject
    if isinstance(value, _PLAIN):
        return type(value).__module__ in ("builtins", "numpy")
    if type(value) in (tuple, list) and depth:
        return all(_is_plain(part, depth - 1) for part in value)
    if type(value) is dict and depth:
        return all(type(key) is str and _is_plain(part, depth - 1) for key, part in value.items())
    return False
