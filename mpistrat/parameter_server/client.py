"""Client: what a worker, or the chief, does with the variables on the servers.

Writes are not answered one by one. What a rank asks a server for is done in the order in which it asks, so it reads what it has
written; `flush` waits until everybody does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array
from mpistrat.parameter_server.frames import REPLY, REQUEST, Channel, Frame, FrameReceiver, Op
from mpistrat.parameter_server.functions import FunctionTable, dumps, loads, loads_error

__all__ = ["Client", "Placed", "here", "install"]

# how many writes a server may have before it is asked whether it has done them
_MOST_WRITES = 64

_client: Client | None = None


class Placed(NamedTuple):
    """Where a variable or shard is kept.

    Attributes
    ----------
    server : int
        The task id of the server.
    number : int
        Its number there.
    """

    server: int
    number: int


class Client:
    """Reads and changes variables on servers; requests to several servers are under way at once.

    Parameters
    ----------
    channel : Channel
        To the servers.

    Attributes
    ----------
    resources : dict
        What a worker keeps for functions, such as datasets, by the number of the call that made it.
    strategy : object
        The strategy of this process.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel, self._ranks = channel, channel.group.servers
        self.resources: dict[int, Any] = {}
        self.strategy: Any = None
        self.functions = FunctionTable(channel)
        self._writes = [0] * len(self._ranks)
        self._created = [0] * len(self._ranks)
        self._replies = [FrameReceiver(channel, REPLY, rank) for rank in self._ranks]
        self._lock = threading.RLock()

    def create(self, server: int, name: str, array: Array) -> Placed:
        """Have a server keep a variable; only the chief does this."""
        with self._lock:
            data = dumps((name, array.dtype.str if array.dtype.kind != "V" else array.dtype, array.shape), name)
            requests = self.channel.send(self._ranks[server], REQUEST, Op.CREATE, data)
            self._finish(requests, server)
            placed = Placed(server, self._created[server])
            self._created[server] += 1
            self.write(Op.ASSIGN, [(placed, 0, array)])
            return placed

    def read(self, parts: Sequence[tuple[Placed, int, Array]]) -> None:
        """Read variables, or consecutive rows of them.

        Parameters
        ----------
        parts : sequence of (Placed, int, ndarray)
            From which variable, from which row on, and into which C-contiguous array.
        """
        with self._lock:
            under_way = []
            for placed, start, target in parts:
                rank = self._ranks[placed.server]
                requests = self.channel.start_receiving(target, rank, REPLY)
                if requests:
                    stop = start + len(target) if target.ndim else 0
                    requests += self.channel.send(rank, REQUEST, Op.READ, variable=placed.number, first=start, second=stop)
                under_way.append((placed.server, requests))
            for server, requests in under_way:
                self._finish(requests, server)

    def read_rows(self, parts: Sequence[tuple[Placed, Array]], target: Array) -> None:
        """Read single rows; each server is asked once.

        Parameters
        ----------
        parts : sequence of (Placed, ndarray)
            From which variable, and which rows, as int64 along one axis; those of one server follow each other.
        target : ndarray
            C-contiguous; takes the rows of all parts, one behind the other.
        """
        with self._lock:
            under_way, start = [], 0
            for server, shards in groupby(parts, lambda part: part[0].server):
                numbers, indices = zip(*((placed.number, rows) for placed, rows in shards), strict=True)
                stop, rank = start + sum(map(len, indices)), self._ranks[server]
                requests = self.channel.start_receiving(target[start:stop], rank, REPLY)
                if requests:
                    asked = np.array([numbers, [len(rows) for rows in indices]], np.int64)
                    requests += self.channel.send(rank, REQUEST, Op.READ_ROWS, asked, *indices, first=len(numbers))
                under_way.append((server, requests))
                start = stop
            for server, requests in under_way:
                self._finish(requests, server)

    def write(self, op: int, parts: Sequence[tuple[Placed, int, Array]]) -> None:
        """Assign, add or subtract arrays; it is done before anything that this rank asks for later.

        Parameters
        ----------
        op : int
            ASSIGN, ASSIGN_ADD or ASSIGN_SUB.
        parts : sequence of (Placed, int, ndarray)
            To which variable, from which row on, and a C-contiguous array of its dtype.
        """
        with self._lock:
            under_way = []
            for placed, start, array in parts:
                if array.nbytes:
                    stop = start + len(array) if array.ndim else 0
                    requests = self.channel.send(
                        self._ranks[placed.server], REQUEST, op, array, variable=placed.number, first=start, second=stop
                    )
                    under_way.append((placed.server, requests))
            self._finish_writes(under_way)

    def scatter(self, method: int, parts: Sequence[tuple[Placed, Array, Array]]) -> None:
        """Apply rows to variables by a method of `SCATTER_METHODS`, given as its index there; as `write` otherwise."""
        with self._lock:
            under_way = []
            for placed, indices, rows in parts:
                if len(indices):
                    requests = self.channel.send(
                        self._ranks[placed.server],
                        REQUEST,
                        Op.SCATTER,
                        indices,
                        rows,
                        method=method,
                        variable=placed.number,
                        first=len(indices),
                    )
                    under_way.append((placed.server, requests))
            self._finish_writes(under_way)

    def update(
        self, fn: Callable[..., Any], parts: Sequence[tuple[Placed, tuple[Any, ...], dict[str, Any]]], wants_results: bool
    ) -> list[Any]:
        """Call a function where variables live, and return its results.

        Parameters
        ----------
        fn : callable
            Is called with each variable and its arguments.
        parts : sequence of (Placed, tuple, dict)
            The variables, the other arguments, and those by keyword.
        wants_results : bool
            Whether the results are to be returned, or None for each.

        Raises
        ------
        Exception
            The first error of the function, after all calls have ended.
        """
        with self._lock:
            function = self.functions.find(fn)
            payloads = [dumps((*given, wants_results), f"an argument of {function.name}") for _, *given in parts]
            under_way = []
            for (placed, *_), payload in zip(parts, payloads, strict=True):
                rank = self._ranks[placed.server]
                requests = self.functions.send(function, rank)
                requests += self.channel.send(rank, REQUEST, Op.UPDATE, payload, variable=placed.number, first=function.number)
                under_way.append((placed.server, requests))
            answers = [self._answer(server, requests) for server, requests in under_way]
        for failed, answer in answers:
            if failed:
                raise loads_error(answer)
        return [loads(answer) if wants_results else None for _, answer in answers]

    def flush(self) -> None:
        """Wait until the servers have done all that this rank has asked them for."""
        with self._lock:
            for server in [server for server, writes in enumerate(self._writes) if writes]:
                self._flush(server)

    def close(self) -> None:
        """Give up what this rank still waits for."""
        for receiver in self._replies:
            receiver.close()

    def _answer(self, server: int, requests: list[Any]) -> tuple[bool, bytes]:
        self._finish(requests, server)
        receiver, found = self._replies[server], list[Frame]()

        def has_come() -> bool:
            frame = receiver.poll()
            if frame is not None:
                found.append(frame)
            return frame is not None

        self.channel.wait_until(has_come, lambda: self._waits_for(server))
        return found[0].op == Op.FAILED, bytes(self.channel.payload(found[0], REPLY))

    def _finish_writes(self, under_way: Sequence[tuple[int, list[Any]]]) -> None:
        for server, requests in under_way:
            self._finish(requests, server)
            self._writes[server] += 1
            if self._writes[server] >= _MOST_WRITES:
                self._flush(server)

    def _flush(self, server: int) -> None:
        answer, rank = np.empty(1, np.uint8), self._ranks[server]
        requests = self.channel.start_receiving(answer, rank, REPLY)
        self._finish([*requests, *self.channel.send(rank, REQUEST, Op.FLUSH)], server)
        self._writes[server] = 0

    def _finish(self, requests: Sequence[Any], server: int) -> None:
        self.channel.wait(requests, lambda: self._waits_for(server))

    def _waits_for(self, server: int) -> str:
        return f"an answer of {self.channel.group.names[self._ranks[server]]}"


def install(client: Client | None) -> None:
    """Make a client the one of this process: what is unpickled here uses it."""
    global _client
    _client = client


def here(group: int) -> Client:
    """Return the client of this process in a group of tasks, given by its number.

    Raises
    ------
    RuntimeError
        If this process has none: it is a server, or its strategy was closed.
    """
    if _client is None or _client.channel.group.number != group:
        raise RuntimeError(
            "variables on servers are read and changed by the chief and by functions that workers run; this process is "
            "neither, or the strategy that made the variable was closed. A function that extended.update calls on a server has "
            "the variable as its first argument"
        )
    return _client
