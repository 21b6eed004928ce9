"""Functions, arguments, results and errors as bytes: what is sent once, and what with each call.

A function is sent by value with what it refers to, once to each rank that runs it, and has a number from then on. What is plain
(arrays, numbers, texts and nests of them) goes by pickle, everything else by cloudpickle.
"""

from __future__ import annotations

import operator
import pickle
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from types import BuiltinFunctionType, FunctionType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from mpistrat.parameter_server.frames import REQUEST, Channel, Op

__all__ = ["FunctionTable", "SentFunction", "dumps", "dumps_error", "loads", "loads_error"]

_KEPT = 64
_PLAIN = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, type(None))
_DEPTH = 8

loads = pickle.loads


class SentFunction:
    """A function as bytes, and which ranks have it.

    Attributes
    ----------
    number : int
        By which it is called.
    data : bytes
        What is sent.
    name : str
        What errors call it.
    """

    def __init__(self, number: int, data: bytes, name: str) -> None:
        self.number, self.data, self.name = number, data, name
        self.ranks: set[int] = set()


class FunctionTable:
    """Sends each function once to each rank that runs it, and has it dropped when it can no longer be called.

    Parameters
    ----------
    channel : Channel
        Where it is sent.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._numbers = channel, count()
        self._by_function: weakref.WeakKeyDictionary[Any, tuple[SentFunction, list[Any]]] = weakref.WeakKeyDictionary()
        self._by_digest: weakref.WeakValueDictionary[bytes, SentFunction] = weakref.WeakValueDictionary()
        self._recent: deque[SentFunction] = deque(maxlen=_KEPT)
        self._unused: deque[tuple[int, set[int]]] = deque()

    def find(self, fn: Callable[..., Any]) -> SentFunction:
        """Return a function as it is sent, with what it refers to; if its names stand for the same as before, that is kept.

        Raises
        ------
        TypeError
            If `fn` cannot be called, or cannot be pickled.
        """
        is_fixed = type(fn) in (FunctionType, BuiltinFunctionType, type)
        refers_to = _referred(fn)
        known = self._by_function.get(fn) if is_fixed else None
        if known is not None and all(map(operator.is_, known[1], refers_to)):
            return known[0]
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
        if is_fixed:
            self._by_function[fn] = found, refers_to
        return found

    def send(self, function: SentFunction, rank: int) -> list[Any]:
        """Start to send a function to a rank, unless it has it; return the requests."""
        requests = []
        while self._unused:
            number, ranks = self._unused.popleft()
            for other in ranks:
                requests += self._channel.send(other, REQUEST, Op.FORGET, first=number)
        if rank not in function.ranks:
            function.ranks.add(rank)
            requests += self._channel.send(rank, REQUEST, Op.DEFINE, function.data, first=function.number)
        return requests


def dumps(value: Any, what: str) -> bytes:
    """Return a value as bytes.

    Raises
    ------
    TypeError
        If it cannot be pickled; `what` is what the message calls it.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if _is_plain(value, _DEPTH) else cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be sent to another rank: {type(error).__name__}: {error}. What it refers to must be picklable: "
            "arrays, numbers, functions and classes are; open files, locks and threads are not"
        ) from error


def dumps_error(error: BaseException, name: str) -> bytes:
    """Return an error of the rank called `name` as bytes, with its traceback; one that cannot be pickled becomes its text."""
    lines = "".join(f"[{name}] {line}\n" for line in "".join(traceback.format_exception(error)).splitlines())
    try:
        data: bytes = cloudpickle.dumps((error, lines))
        pickle.loads(data)
    except Exception:
        data = cloudpickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), lines))
    return data


def loads_error(data: Any) -> BaseException:
    """Return an error that another rank raised, whose cause shows its traceback there."""
    error: BaseException
    error, lines = pickle.loads(data)
    error.__cause__ = _RemoteTracebackError(lines)
    return error


class _RemoteTracebackError(Exception):
    """Shows, as the cause of an error, where on another rank it was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _referred(fn: Any) -> list[Any]:
    """Return what the names in a function stand for that it does not define itself; not the function itself."""
    if type(fn) is not FunctionType:
        return []
    found = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    for cell in fn.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # the name is not bound yet
            found.append(None)
    return [None if one is fn else one for one in found]


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
