"""Client: what a worker, or the chief, does with the variables on the servers.

Writes are not answered one by one. What a rank asks a server for is done in the order in which it asks, so it reads what it has
written; `flush` waits until everybody does. What a server of this node keeps is read where it lies, once the server has made
all updates of this rank.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.frames import REPLY, REQUEST, Channel, Frame, FrameReceiver, Op
from mpistrat.parameter_server.functions import FunctionTable, dumps, loads, loads_error
from mpistrat.parameter_server.shared_arrays import AttachedArray, attach
from mpistrat.parameter_server.tasks import WORKER

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Client", "Placed", "here", "install"]

# how many writes a server may have before it is asked whether it has done them
_MOST_WRITES = 64

_client: Client | None = None

T = TypeVar("T")


class Placed(NamedTuple):
    """Where a variable or shard is kept.

    Attributes
    ----------
    server : int
        The task id of the server.
    number : int
        Its number there.
    name : str
        What errors call it.
    """

    server: int
    number: int
    name: str


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
    is_worker : bool
        Whether this rank is a worker.
    staleness : Counter
        Of reads with a bound: how many have lacked 0, 1, 2, … updates.
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
        self._rank, self.is_worker = channel.comm.Get_rank(), channel.group.task_type == WORKER
        shares = settings.INTRA_TRANSPORT.read() in ("auto", "shared_memory")
        self._is_near = [shares and channel.group.nodes[rank] == channel.group.nodes[self._rank] for rank in self._ranks]
        self._attached: dict[Placed, AttachedArray | None] = {}
        self._updates = [0] * len(self._ranks)
        self._copies: dict[Placed, tuple[int, Array]] = {}
        self.staleness: Counter[int] = Counter()

    def create(self, server: int, name: str, array: Array) -> Placed:
        """Have a server keep a variable; only the chief does this."""
        with self._lock:
            data = dumps((name, array.dtype.str if array.dtype.kind != "V" else array.dtype, array.shape), name)
            requests = self.channel.send(self._ranks[server], REQUEST, Op.CREATE, data)
            self._finish(server, f"{name}, which is new", requests)
            placed = Placed(server, self._created[server], name)
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
            for placed, start, target in [part for part in parts if not self._reads_shared(*part)]:
                rank = self._ranks[placed.server]
                requests = self.channel.start_receiving(target, rank, REPLY)
                if requests:
                    stop = start + len(target) if target.ndim else 0
                    requests += self.channel.send(rank, REQUEST, Op.READ, variable=placed.number, first=start, second=stop)
                under_way.append((placed.server, f"read of {placed.name}", requests))
            self._for_each(under_way, self._finish)

    def read_bounded(self, parts: Sequence[tuple[Placed, Array]], max_staleness: int) -> None:
        """Read whole variables, each of which may lack as many updates; count how many it lacks.

        Parameters
        ----------
        parts : sequence of (Placed, ndarray)
            Which variable, and into which C-contiguous array.
        max_staleness : int
            How many updates that its server has made a copy may lack.
        """
        with self._lock:
            by_message = [part for part in parts if not self._reads_shared(part[0], 0, part[1])]
            self.staleness[0] += len(parts) - len(by_message)
            under_way = []
            for placed, target in by_message:
                version, _ = self._copies.get(placed, (-1, target))
                requests = self.channel.send(
                    self._ranks[placed.server],
                    REQUEST,
                    Op.READ_NEWER,
                    variable=placed.number,
                    first=version,
                    second=max_staleness,
                )
                under_way.append((placed, target, requests))
            self._for_each(under_way, self._take_newer)

    def read_rows(self, parts: Sequence[tuple[Placed, Array]], target: Array) -> None:
        """Read single rows; each server is asked once, and for a row once.

        Parameters
        ----------
        parts : sequence of (Placed, ndarray)
            From which variable, and which rows, as int64 along one axis; those of one server follow each other.
        target : ndarray
            C-contiguous; takes the rows of all parts, one behind the other.
        """
        with self._lock:
            by_message, start = [], 0
            for server, group in groupby(parts, lambda part: part[0].server):
                shards = list(group)
                stop = start + sum(len(rows) for _, rows in shards)
                wanted = target[start:stop]
                if wanted.nbytes and not self._takes_shared(shards, wanted):
                    by_message.append((server, shards, wanted))
                start = stop
            under_way = [(server, wanted, *self._ask_rows(server, shards, wanted)) for server, shards, wanted in by_message]
            self._for_each(under_way, self._take_rows)

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
                    under_way.append((placed.server, f"update of {placed.name}", requests))
            self._for_each(under_way, self._finish_write)

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
                    under_way.append((placed.server, f"update of {placed.name}", requests))
            self._for_each(under_way, self._finish_write)

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
                under_way.append((placed, f"call of {function.name}", requests))
            answers = self._for_each(under_way, self._answer)
        for failed, answer in answers:
            if failed:
                raise loads_error(answer)
        return [loads(answer) if wants_results else None for _, answer in answers]

    def flush(self) -> None:
        """Wait until the servers have done all that this rank has asked them for."""
        with self._lock:
            self._for_each([(server,) for server, writes in enumerate(self._writes) if writes], self._flush)

    def close(self) -> None:
        """Give up what this rank still waits for."""
        for receiver in self._replies:
            receiver.close()

    def _reads_shared(self, placed: Placed, start: int, target: Array) -> bool:
        """Read rows from memory that the server shares; return False if it does not, or is changing them again and again."""
        array = self._shared(placed)
        return array is not None and array.read(start, target)

    def _takes_shared(self, shards: Sequence[tuple[Placed, Array]], target: Array) -> bool:
        """Read single rows as `_reads_shared` does."""
        start = 0
        for placed, rows in shards:
            array, stop = self._shared(placed), start + len(rows)
            if array is None or not array.take(rows, target[start:stop]):
                return False
            start = stop
        return True

    def _shared(self, placed: Placed) -> AttachedArray | None:
        """Return a variable in memory that its server shares; None if it does not, is lost, or lacks updates of this rank."""
        if not self._is_near[placed.server] or self.channel.has_lost(self._ranks[placed.server]):
            return None
        if placed not in self._attached:
            self._attached[placed] = self._attach(placed)
        array = self._attached[placed]
        return None if array is None or array.done[self._rank] < self._updates[placed.server] else array

    def _attach(self, placed: Placed) -> AttachedArray | None:
        requests = self.channel.send(self._ranks[placed.server], REQUEST, Op.LOCATE, variable=placed.number)
        address = loads(self._answer(placed, "place", requests)[1])
        return None if address is None else attach(address, self.channel.comm.Get_size())

    def _take_newer(self, placed: Placed, target: Array, requests: list[Any]) -> None:
        """Take a variable that has come, or the copy of it that is new enough; count how many updates that lacks."""
        frame = self._reply(placed, "read", requests)
        version, has_come = frame.first, frame.second
        if has_come:
            self.channel.receive_payload(frame, REPLY, target)
            self._copies[placed] = version, target.copy()
            self.staleness[0] += 1
        else:
            kept, target[...] = self._copies[placed]
            self.staleness[version - kept] += 1

    def _ask_rows(
        self, server: int, shards: Sequence[tuple[Placed, Array]], like: Array
    ) -> tuple[Array, Array, list[MPI.Request]]:
        """Ask for each row once; return where they will be, which of them is wanted in each place, and the requests."""
        found = [np.unique(rows, return_inverse=True) for _, rows in shards]
        counts = [len(different) for different, _ in found]
        firsts = np.cumsum([0, *counts[:-1]])
        position = np.concatenate([inverse + first for (_, inverse), first in zip(found, firsts, strict=True)])
        arrived = np.empty((sum(counts), *like.shape[1:]), like.dtype)
        requests = self.channel.start_receiving(arrived, self._ranks[server], REPLY)
        asked = np.array([[placed.number for placed, _ in shards], counts], np.int64)
        different = [rows for rows, _ in found]
        requests += self.channel.send(self._ranks[server], REQUEST, Op.READ_ROWS, asked, *different, first=len(shards))
        return arrived, position, requests

    def _take_rows(self, server: int, target: Array, arrived: Array, position: Array, requests: list[Any]) -> None:
        self._finish(server, "read of rows", requests)
        arrived.take(position, 0, target, "clip")

    def _answer(self, placed: Placed, what: str, requests: list[Any]) -> tuple[bool, bytes]:
        frame = self._reply(placed, what, requests)
        return frame.op == Op.FAILED, bytes(self.channel.payload(frame, REPLY))

    def _reply(self, placed: Placed, what: str, requests: list[Any]) -> Frame:
        self._finish(placed.server, what, requests)
        receiver, found = self._replies[placed.server], list[Frame]()

        def has_come() -> bool:
            frame = receiver.poll()
            if frame is not None:
                found.append(frame)
            return frame is not None

        self.channel.wait_until(has_come, lambda: self._waits_for(placed.server, f"{what} of {placed.name}"))
        return found[0]

    def _finish_write(self, server: int, what: str, requests: list[Any]) -> None:
        self._finish(server, what, requests)
        self._updates[server] += 1
        self._writes[server] += 1
        if self._writes[server] >= _MOST_WRITES:
            self._flush(server)

    def _flush(self, server: int) -> None:
        answer, rank = np.empty(1, np.uint8), self._ranks[server]
        requests = self.channel.start_receiving(answer, rank, REPLY)
        self._finish(server, "updates before", [*requests, *self.channel.send(rank, REQUEST, Op.FLUSH)])
        self._writes[server] = 0

    def _for_each(self, under_way: Sequence[tuple[Any, ...]], finish: Callable[..., T]) -> list[T]:
        """Finish requests to several servers; all of them where one is lost, too: the others still answer."""
        found, lost = list[T](), None
        for one in under_way:
            try:
                found.append(finish(*one))
            except UnavailableError as error:
                lost = error
        if lost is not None:
            raise lost
        return found

    def _finish(self, server: int, what: str, requests: Sequence[Any]) -> None:
        self.channel.wait(requests, lambda: self._waits_for(server, what))

    def _waits_for(self, server: int, what: str) -> str:
        return f"an answer of {self.channel.group.names[self._ranks[server]]}: {what}"


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
