"""Client: what a worker, or the chief, does with the variables on the servers.

Writes are not answered one by one. What a rank asks a server for is done in the order in which it asks, so it reads what it has
written; `flush` waits until everybody does.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from types import TracebackType
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import CollectiveError, UnavailableError
from mpistrat.groups.group import keep_alive_for_peers
from mpistrat.parameter_server.functions import FunctionTable, dumps, loads, loads_error
from mpistrat.parameter_server.messages import (
    REPLY,
    REQUEST,
    SCATTERS,
    WRITES,
    Channel,
    Create,
    Flush,
    Message,
    Read,
    ReadRows,
    Receiver,
    Scatter,
    Update,
    Write,
)
from mpistrat.parameter_server.tasks import CHIEF

__all__ = ["Client", "Placed", "current_client", "install", "uninstall"]

# how many writes a server may have before it is asked whether it has done them
_MOST_WRITES = 64

_clients: dict[int, Client] = {}  # by the numbers of their groups


class Placed:
    """Where a variable or shard is kept; its server frees that once the chief has no reference to this any more.

    Attributes
    ----------
    group : int
        The number of the group of tasks.
    server, number : int
        The task id of the server, and the number of the variable there.
    name : str
        What errors call it.
    nbytes : int
        How large it is.
    is_dropped : bool
        Whether the chief has dropped it: it cannot be used any more.
    """

    def __init__(self, group: int, server: int, number: int, name: str, nbytes: int) -> None:
        self.group, self.server, self.number, self.name, self.nbytes = group, server, number, name, nbytes
        self.is_dropped = False

    @property
    def key(self) -> tuple[int, int]:
        """What no other variable of the group has."""
        return self.server, self.number

    def __reduce__(self) -> tuple[Any, ...]:
        return _placed, (self.group, self.server, self.number, self.name, self.nbytes)


class _Pending:
    """What a server was asked for, with the messages that are under way for it and, once it is there, the answer."""

    def __init__(self, name: str, what: str, server: int, number: int, *, is_answered: bool = False) -> None:
        self.name, self.what, self.server, self.number, self.is_answered = name, what, server, number, is_answered
        self.requests: list[Any] = []
        self.has_ended = False
        self.answer: tuple[bool, bytes] | None = None

    def describe(self) -> str:
        return f"an answer of {self.name}: {self.what}"


class _Calls:
    """Is held by each call to the servers; refuses all calls after one that was given up before it had its answers."""

    def __init__(self, name: str) -> None:
        self._name, self.lock, self.under_way = name, threading.RLock(), list[_Pending]()
        self._given_up: tuple[BaseException, str] | None = None

    def __enter__(self) -> None:
        self.lock.acquire()
        if self._given_up is not None:
            self.lock.release()
            cause, what = self._given_up
            raise CollectiveError(
                f"{self._name}: no call can reach the servers any more, since an earlier one was given up "
                f"({type(cause).__name__}) while it waited for {what}, which may still come. Start "
                "the job again; MPISTRAT_TIMEOUT_SECONDS sets how long a call waits, 0 without a limit"
            ) from cause

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if error is not None and self.under_way:
            keep_alive_for_peers(self.under_way)
            self._given_up, self.under_way = (error, self.under_way[0].describe()), []
        self.lock.release()


class Client:
    """Reads and changes variables on servers; requests to several servers are under way at once.

    Attributes
    ----------
    resources : dict
        What a worker keeps for functions, such as datasets, by the number of the call that made it.
    strategy : object
        The strategy of this process.
    placed : WeakValueDictionary
        The variables that this process refers to, by their keys.
    dropped : deque
        On the chief: the keys of those that it has dropped, and that are to be freed.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel, self._ranks = channel, channel.group.servers
        self.resources: dict[int, Any] = {}
        self.strategy: Any = None
        self.functions = FunctionTable(channel)
        self.placed: weakref.WeakValueDictionary[tuple[int, int], Placed] = weakref.WeakValueDictionary()
        self.dropped: deque[tuple[int, int]] = deque()
        self._known_as_dropped = set[tuple[int, int]]()
        self._is_chief = channel.group.task_type == CHIEF
        self._writes, self._created, self._numbers = ([0] * len(self._ranks) for _ in range(3))
        self._replies = [Receiver(channel, REPLY, rank) for rank in self._ranks]
        self._calls = _Calls(channel.name)

    def create(self, server: int, name: str, array: Array) -> Placed:
        """Have a server keep a variable; only the chief does this."""
        with self._calls:
            data = dumps((name, array.dtype.str if array.dtype.kind != "V" else array.dtype, array.shape), name)
            placed = Placed(self.channel.group.number, server, self._created[server], name, array.nbytes)
            self._created[server] += 1
            number = self._next_number(server)
            self._ask(server, f"{name}, which is new", Create(number, placed.number), data)
            self._finish()
            self.placed[placed.key] = placed
            weakref.finalize(placed, self.dropped.append, placed.key).atexit = False  # at any moment: only notes it
            self.write("assign", [(placed, 0, array)])
            return placed

    def read(self, parts: Sequence[tuple[Placed, int, Array]]) -> None:
        """Read variables, or consecutive rows: of which, from which row on, and into which C-contiguous array."""
        with self._calls:
            _check_living(parts)
            for placed, start, target in parts:
                if target.nbytes:
                    number, stop = self._next_number(placed.server), start + len(target) if target.ndim else 0
                    message = Read(number, placed.number, start, stop)
                    self._ask(placed.server, f"read of {placed.name}", message, into=target)
            self._finish()

    def read_rows(self, parts: Sequence[tuple[Placed, Array]], target: Array) -> None:
        """Read single rows, each server's parts behind each other; each server is asked once, and for a row once."""
        with self._calls:
            _check_living(parts)
            arrived, start = [], 0
            for server, group in groupby(parts, lambda part: part[0].server):
                shards = list(group)
                stop = start + sum(len(rows) for _, rows in shards)
                wanted, start = target[start:stop], stop
                if wanted.nbytes:
                    arrived.append((*self._ask_rows(server, shards, wanted), wanted))
            self._finish()
            for rows, position, wanted in arrived:
                rows.take(position, 0, wanted, "clip")

    def write(self, method: str, parts: Sequence[tuple[Placed, int, Array]]) -> None:
        """Change variables by one of `WRITES`, from a row on; it is done before anything that this rank asks for later."""
        with self._calls:
            _check_living(parts)
            for placed, start, array in parts:
                if array.nbytes:
                    number, stop = self._next_number(placed.server), start + len(array) if array.ndim else 0
                    self._ask_to_write(placed, Write(number, placed.number, WRITES.index(method), start, stop), array)
            self._finish_writes()

    def scatter(self, method: str, parts: Sequence[tuple[Placed, Array, Array]]) -> None:
        """Apply rows, with their indices, to variables by one of `SCATTERS`; as `write` otherwise."""
        with self._calls:
            _check_living(parts)
            for placed, indices, rows in parts:
                if len(indices):
                    number = self._next_number(placed.server)
                    message = Scatter(number, placed.number, SCATTERS.index(method), len(indices))
                    self._ask_to_write(placed, message, indices, rows)
            self._finish_writes()

    def update(
        self, fn: Callable[..., Any], parts: Sequence[tuple[Placed, tuple[Any, ...], dict[str, Any]]], wants_results: bool
    ) -> list[Any]:
        """Call a function where variables live; when all calls have ended, raise its first error, or return the results."""
        with self._calls:
            _check_living(parts)
            function = self.functions.find(fn)
            payloads = [dumps((*given, wants_results), f"an argument of {function.name}") for _, *given in parts]
            asked = []
            for (placed, *_), payload in zip(parts, payloads, strict=True):
                sent = self.functions.send(function, self._ranks[placed.server])
                message = Update(self._next_number(placed.server), placed.number, function.number)
                what = f"call of {function.name} of {placed.name}"
                asked.append(self._ask(placed.server, what, message, payload, before=sent, is_answered=True))
            self._finish()
        answers = [one.answer for one in asked if one.answer is not None]
        for is_error, answer in answers:
            if is_error:
                raise loads_error(answer)
        return [loads(answer) if wants_results else None for _, answer in answers]

    def flush(self) -> None:
        """Wait until the servers have done all that this rank has asked them for."""
        if any(self._writes):
            with self._calls:
                self._flush([server for server, writes in enumerate(self._writes) if writes])

    def find(self, placed: Placed) -> Placed:
        """Return this process's object of a variable that another one has sent; the chief has all that it has not dropped."""
        with self._calls.lock:
            found = self.placed.get(placed.key)
            if found is not None:
                return found
            placed.is_dropped = self._is_chief or placed.key in self._known_as_dropped
            if not placed.is_dropped:
                self.placed[placed.key] = placed
            return placed

    def forget(self, keys: Sequence[tuple[int, int]]) -> None:
        """Use variables no more that the chief has dropped; all that this rank has asked their servers for is done then."""
        with self._calls.lock:
            self._known_as_dropped.update(keys)
            for key in keys:
                if (placed := self.placed.get(key)) is not None:
                    placed.is_dropped = True
        with suppress(Exception):  # where calls were given up, nothing is sent any more
            self.flush()

    def close(self) -> None:
        """Give up what this rank still waits for."""
        for receiver in self._replies:
            receiver.close()

    def _next_number(self, server: int) -> int:
        self._numbers[server] += 1
        return self._numbers[server]

    def _ask(
        self,
        server: int,
        what: str,
        message: Message,
        *payload: Any,
        into: Array | None = None,
        before: Sequence[Any] = (),
        is_answered: bool = False,
    ) -> _Pending:
        """Start to ask a server for something; what it answers without a header goes `into` an array."""
        rank = self._ranks[server]
        pending = _Pending(self.channel.group.names[rank], what, server, message[0], is_answered=is_answered)
        self._calls.under_way.append(pending)
        pending.requests.extend(before)
        if into is not None:
            pending.requests.extend(self.channel.start_receiving(into, rank, REPLY))
        pending.requests.extend(self.channel.send(rank, REQUEST, message, *payload))
        return pending

    def _ask_rows(self, server: int, shards: Sequence[tuple[Placed, Array]], like: Array) -> tuple[Array, Array]:
        """Ask for each row once; return where they will be, and which of them is wanted in each place."""
        found = [np.unique(rows, return_inverse=True) for _, rows in shards]
        counts = [len(different) for different, _ in found]
        firsts = np.cumsum([0, *counts[:-1]])
        position = np.concatenate([inverse + first for (_, inverse), first in zip(found, firsts, strict=True)])
        arrived = np.empty((sum(counts), *like.shape[1:]), like.dtype)
        wanted = np.array([[placed.number for placed, _ in shards], counts], np.int64)
        different = [rows for rows, _ in found]
        message = ReadRows(self._next_number(server), len(shards))
        self._ask(server, "read of rows", message, wanted, *different, into=arrived)
        return arrived, position

    def _ask_to_write(self, placed: Placed, message: Message, *payload: Array) -> None:
        self._writes[placed.server] += 1
        self._ask(placed.server, f"update of {placed.name}", message, *payload)

    def _finish_writes(self) -> None:
        self._finish()
        full = [server for server, writes in enumerate(self._writes) if writes >= _MOST_WRITES]
        if full:
            self._flush(full)

    def _flush(self, servers: Sequence[int]) -> None:
        for server in servers:
            self._ask(server, "updates before", Flush(self._next_number(server)), into=np.empty(1, np.uint8))
        self._finish()
        for server in servers:
            self._writes[server] = 0

    def _finish(self) -> None:
        """Wait for all that is under way, also where one server is lost: the others still answer."""
        left, lost = self._calls.under_way, list[UnavailableError]()

        def have_ended() -> bool:
            busy = set[int]()  # a server does one thing after the other, and answers in this order
            for pending in left:
                if pending.server not in busy and not self._has_ended(pending, lost):
                    busy.add(pending.server)
            left[:] = [pending for pending in left if not pending.has_ended]
            return not left

        if not have_ended():
            self.channel.wait_until(have_ended, lambda: left[0].describe())
        if lost:
            raise lost[0]

    def _has_ended(self, pending: _Pending, lost: list[UnavailableError]) -> bool:
        while pending.requests:
            try:
                if not self.channel.has_ended(pending.requests[-1]):
                    return False
            except UnavailableError as error:  # the others must end, too: nothing may arrive in memory that is given back
                lost.append(error)
                pending.is_answered = False
            pending.requests.pop()
        try:
            pending.has_ended = not pending.is_answered or self._has_come(pending)
        except UnavailableError as error:
            lost.append(error)
            pending.has_ended = True
        return pending.has_ended

    def _has_come(self, pending: _Pending) -> bool:
        """Take the answer to a request, if it is there: answers of a server come in the order of requests."""
        received = self._replies[pending.server].poll()
        if received is None:
            return False
        if received.message.number != pending.number:
            raise CollectiveError(
                f"{self.channel.name}: waited for {pending.describe()}, request {pending.number}; what came answers request "
                f"{received.message.number}"
            )
        pending.answer = bool(received.message.is_error), bytes(self.channel.payload(received, REPLY))
        return True


def _check_living(parts: Sequence[tuple[Any, ...]]) -> None:
    for placed, *_ in parts:
        if placed.is_dropped:
            raise RuntimeError(
                f"{placed.name} was dropped by the chief, and its server has freed it: keep the variable on the chief for as "
                "long as functions use it"
            )


def _placed(*fields: Any) -> Placed:
    """Return what was pickled; a server, which uses no variables of others, need not know it."""
    placed = Placed(*fields)
    client = _clients.get(placed.group)
    return placed if client is None else client.find(placed)


def install(client: Client) -> None:
    """Have what belongs to a group of tasks, and is unpickled here, use a client."""
    _clients[client.channel.group.number] = client


def uninstall(client: Client) -> None:
    """Undo `install`."""
    _clients.pop(client.channel.group.number, None)


def current_client(group: int) -> Client:
    """Return the client of this process in a group of tasks, given by its number.

    Raises
    ------
    RuntimeError
        If this process has none: it is a server, or its strategy was closed.
    """
    if group not in _clients:
        raise RuntimeError(
            "variables on servers are read and changed by the chief and by functions that workers run; this process is "
            "neither, or the strategy that made the variable was closed. A function that extended.update calls on a server has "
            "the variable as its first argument"
        )
    return _clients[group]
