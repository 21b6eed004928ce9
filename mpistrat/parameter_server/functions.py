"""Functions, arguments, results and errors as bytes: what is sent once, and what with each call.

A function is pickled each time, with what it refers to then; the same bytes are sent once to each rank that runs it, and have a
number from then on.
"""

from __future__ import annotations

import inspect
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple, cast

from mpistrat.parameter_server.messages import REQUEST, Channel, Define, Request

_MOST_FUNCTIONS = 256  # that a rank keeps of each other one

_local = threading.local()

loads = pickle.loads


class Pickled(NamedTuple):
    """A value as bytes, and what must stay where it is for as long as these may be used."""

    data: bytes
    uses: list[Any]


@dataclass(eq=False)
class SentFunction:
    """A function as bytes, which has a number, and what errors call it."""

    number: int
    name: str
    digest: bytes
    pickled: Pickled


class FunctionTable:
    """Sends each function once to each rank that runs it."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._numbers = channel, count()
        self._found: weakref.WeakValueDictionary[bytes, SentFunction] = weakref.WeakValueDictionary()
        self._known: dict[int, dict[bytes, int]] = {}  # of each rank: numbers, the one that was used last at the end

    def find(self, fn: Callable[..., Any]) -> SentFunction:
        """Return a function as it is sent, with what it refers to now."""
        name = getattr(fn, "__qualname__", repr(fn))
        if not callable(fn):
            raise TypeError(f"a function is scheduled, or called where a variable lives; got {fn!r}")
        pickled = pickled_with_uses(fn, f"function {name}")
        digest = blake2b(pickled.data).digest()
        found = self._found.get(digest)
        if found is None:
            found = self._found[digest] = SentFunction(next(self._numbers), name, digest, pickled)
        return found

    def send(self, requests: list[Request], rank: int, function: SentFunction) -> int:
        """Return the number that a function has on a rank, where it is sent to unless that has it."""
        known = self._known.setdefault(rank, {})
        number = known.pop(function.digest, None)
        if number is None:
            forgotten = known.pop(next(iter(known))) if len(known) >= _MOST_FUNCTIONS else -1
            number = function.number
            self._channel.send(requests, rank, REQUEST, Define(number, forgotten), function.pickled.data)
        known[function.digest] = number
        return number


def parameters_of(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; none for a function in C that does not tell them."""
    try:
        return inspect.signature(fn).parameters
    except ValueError:
        return {}


def use(thing: object) -> None:
    """Note, where something is pickled that stands for a thing, that the thing must stay where it is."""
    if (uses := getattr(_local, "uses", None)) is not None:
        uses.append(thing)


def pickled_with_uses(value: Any, what: str) -> Pickled:
    """Return a value as bytes, and what it uses; errors call it `what`."""
    uses = _local.uses = list[Any]()
    try:
        return Pickled(dumps(value, what), uses)
    finally:
        _local.uses = None


def loads_on(worker: int | None, data: bytes | bytearray | memoryview) -> Any:
    """Return what bytes stand for on a worker, or on a server."""
    _local.worker = worker
    try:
        return loads(data)
    finally:
        _local.worker = None


def loading_worker() -> int | None:
    """Return for which worker something is unpickled now."""
    return getattr(_local, "worker", None)


def dumps(value: Any, what: str) -> bytes:
    """Return a value as bytes; errors call it `what`."""
    try:
        return _by_value(value)
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

    return cast("bytes", cloudpickle.dumps(value))
