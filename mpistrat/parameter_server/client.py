"""Client: what a worker, or the chief, does with the variables on the servers.

Writes are not acknowledged one by one. A server handles the requests of a rank in their order, so a rank reads what it has
written; after `flush` all ranks do.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mpistrat.arrays import Array
from mpistrat.errors import CollectiveError, UnavailableError
from mpistrat.groups.group import keep_alive_for_peers
from mpistrat.parameter_server import messages
from mpistrat.parameter_server.functions import FunctionTable, dumps, loads, loads_error, use
from mpistrat.parameter_server.messages import BARE, REPLY, REQUEST, Channel, Message, Received, Receiver
from mpistrat.state.changes import METHODS

# how many writes a server may have before it is asked whether it has done them
_MOST_WRITES = 64

numbers = count()  # of the variables and calls of this process: no two have the same one
_clients: dict[int, Client] = {}  # by the numbers of their groups


@dataclass(eq=False)
class VariableRef:
    """Where a variable or shard is kept; its server frees that once the chief has no reference to this any more."""

    group: int
    server: int
    number: int
    name: str
    nbytes: int

    def __reduce__(self) -> tuple[Any, ...]:
        use(self)
        return _unpickled_ref, (self.group, self.server, self.number, self.name, self.nbytes)


@dataclass(eq=False, slots=True)
class _Pending:
    """What a server was asked for: the messages that are under way for it, and the call that it answers, with the answer."""

    server: int
    what: str
    call: int | None = None
    requests: list[messages.Request] = field(default_factory=list)
    is_bare: bool = False  # the answer is an array without a header, unless it is an error
    arriving: list[messages.Request] = field(default_factory=list)  # that array
    is_error: bool = False
    answer: bytes = b""


class Client:
    """Reads and changes variables on servers; requests to several servers are under way at once.

    What belongs to its group of tasks, and is unpickled in this process, uses it until it is closed.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel, self._ranks = channel, channel.servers
        self.strategy: Any = None
        self.functions = FunctionTable(channel)
        # what returns, or raises, what a worker keeps for functions, such as a dataset, by the number of the call that made it
        self.resources: dict[int, Callable[[], Any]] = {}
        # of the chief: the variables that it refers to, by their numbers
        self.refs: weakref.WeakValueDictionary[int, VariableRef] = weakref.WeakValueDictionary()
        # what the chief has dropped, and is to be freed: variables, and what calls have made
        self.dropped: deque[int] = deque()
        self._writes = [0] * len(self._ranks)  # of which each server has not yet said that it has done them
        self._replies = [Receiver(channel, REPLY, rank) for rank in self._ranks]
        self._lock = threading.RLock()
        self._under_way: list[_Pending] = []
        self._given_up: tuple[BaseException, str] | None = None
        _clients[channel.number] = self

    def create(self, server: int, name: str, array: Array) -> VariableRef:
        """Have a server keep a variable; only the chief does this."""
        ref = VariableRef(self.channel.number, server, next(numbers), name, array.nbytes)
        dtype = array.dtype.str if array.dtype.kind != "V" else array.dtype
        payload = dumps((name, dtype, array.shape), name)
        with self._call():
            self._ask(server, f"creation of {name}", messages.Create(ref.number), payload, call=ref.number)
        self.refs[ref.number] = ref
        weakref.finalize(ref, self.dropped.append, ref.number).atexit = False  # at any moment: only notes it
        self.write("assign", [(ref, array, None)])
        return ref

    def read(self, parts: Sequence[tuple[VariableRef, int | Array, Array]]) -> None:
        """Read variables or rows: of which, from which row on or which ones, and into which C-contiguous array."""
        with self._call():
            for ref, rows, target in parts:
                if not target.nbytes:
                    continue
                what, call = f"read of {ref.name}", next(numbers)
                if isinstance(rows, int):
                    stop = rows + len(target) if target.ndim else 0
                    self._ask(ref.server, what, messages.Read(call, ref.number, rows, stop), call=call, into=target)
                else:
                    self._ask(ref.server, what, messages.Gather(call, ref.number), rows, call=call, into=target)

    def write(self, method: str, parts: Sequence[tuple[VariableRef, Array, Array | None]]) -> None:
        """Change variables, or rows with these indices, by one of `METHODS`, before anything that this rank asks for later."""
        with self._call():
            for ref, values, indices in parts:
                if values.nbytes:
                    self._writes[ref.server] += 1
                    given = (values,) if indices is None else (indices, values)
                    message = messages.Write(ref.number, METHODS.index(method), 0 if indices is None else len(indices))
                    self._ask(ref.server, f"update of {ref.name}", message, *given)

    def update(
        self, fn: Callable[..., Any], parts: Sequence[tuple[VariableRef, tuple[Any, ...], dict[str, Any]]], wants_results: bool
    ) -> list[Any]:
        """Call a function where variables live; when all calls have ended, raise its first error, or return the results."""
        function = self.functions.find(fn)
        payloads = [dumps(tuple(given), f"an argument of {function.name}") for _, *given in parts]
        asked = []
        with self._call():
            for (ref, *_), payload in zip(parts, payloads, strict=True):
                what = f"call of {function.name} of {ref.name}"
                self._under_way.append(defined := _Pending(ref.server, what))
                number = self.functions.send(defined.requests, self._ranks[ref.server], function)
                message = messages.Run(next(numbers), number, ref.number, wants_results)
                asked.append(self._ask(ref.server, what, message, payload, call=message.call))
        return [loads(one.answer) if wants_results else None for one in asked]

    def flush(self) -> None:
        """Wait until the servers have done all that this rank has asked them for, and raise the first error in that."""
        if any(self._writes):
            with self._call():
                self._confirm_writes(1)

    def close(self) -> None:
        """Give up what this rank still waits for."""
        _clients.pop(self.channel.number, None)
        for receiver in self._replies:
            receiver.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Hold the servers for a call, and wait for all that it asks for, or raise the first error in that.

        A call that is given up before all has come is the last one.
        """
        with self._lock:
            if self._under_way:
                advice = "signal handlers and callbacks must not use variables on servers meanwhile"
                raise RuntimeError(f"{self.channel.name}: this thread waits for {self._waits_for()}: {advice}")
            if self._given_up is not None:
                cause, what = self._given_up
                raise CollectiveError(
                    f"{self.channel.name}: no call can reach the servers any more, since an earlier one was given up "
                    f"({type(cause).__name__}) while it waited for {what}, which may still come. Start "
                    "the job again; MPISTRAT_TIMEOUT_SECONDS sets how long a call waits, 0 without a limit"
                ) from cause
            try:
                yield
                asked = list(self._under_way)
                self._finish()
                self._confirm_writes(_MOST_WRITES)
                _raise_first_error(asked)
            except BaseException as error:
                if self._under_way:
                    keep_alive_for_peers(self._under_way)
                    self._given_up, self._under_way = (error, self._waits_for()), []
                raise

    def _ask(
        self, server: int, what: str, message: Message, *payload: Any, call: int | None = None, into: Array | None = None
    ) -> _Pending:
        """Start to ask a server for something; it answers a call, perhaps without a header, `into` an array."""
        rank, pending = self._ranks[server], _Pending(server, what, call, is_bare=into is not None)
        self._under_way.append(pending)
        if into is not None:
            self.channel.receive(pending.arriving, rank, BARE, message[0], into)
        self.channel.send(pending.requests, rank, REQUEST, message, *payload)
        return pending

    def _confirm_writes(self, least: int) -> None:
        """Wait until servers that have so many writes have done them."""
        servers = [server for server, writes in enumerate(self._writes) if writes >= least]
        if servers:
            calls = zip(servers, numbers, strict=False)
            asked = [self._ask(server, "updates before", messages.Flush(call), call=call) for server, call in calls]
            self._finish()
            for server in servers:
                self._writes[server] = 0
            _raise_first_error(asked)

    def _finish(self) -> None:
        """Wait for all that is under way, also where one server is lost: the others still answer."""
        lost: list[UnavailableError] = []

        def have_ended() -> bool:
            busy = set[int]()  # a server does one thing after the other, and answers in this order
            for pending in list(self._under_way):
                if pending.server not in busy:
                    if self._has_ended(pending, lost):
                        self._under_way.remove(pending)
                    else:
                        busy.add(pending.server)
            return not self._under_way

        if not have_ended():
            self.channel.wait_until(have_ended, self._waits_for)
        if lost:
            raise lost[0]

    def _waits_for(self) -> str:
        pending = self._under_way[0]
        return f"an answer of {self.channel.names[self._ranks[pending.server]]}: {pending.what}"

    def _has_ended(self, pending: _Pending, lost: list[UnavailableError]) -> bool:
        """Return whether messages have ended, and the answer has come, if there is one; or a server is lost."""
        losses = len(lost)
        has_sent = self.channel.have_ended(pending.requests, lost)  # all of them, also where the server is lost
        has_arrived = self.channel.have_ended(pending.arriving, lost)
        if len(lost) > losses or (pending.is_bare and has_arrived):
            pending.call = None  # no other answer comes
        if has_sent and pending.call is not None:
            try:
                if (received := self._replies[pending.server].poll()) is not None:
                    self._take_answer(received)
            except UnavailableError as error:
                lost.append(error)
                pending.call = None
        return has_sent and pending.call is None and not pending.arriving

    def _take_answer(self, received: Received) -> None:
        """Give an answer to what has asked: an error may come before the array of an earlier call, which has another tag."""
        call, is_error = received.message
        pending = next((one for one in self._under_way if one.call == call), None)
        if pending is None:
            waited = f"waited for {self._waits_for()}, request {self._under_way[0].call}"
            raise CollectiveError(f"{self.channel.name}: {waited}; what came answers request {call}")
        pending.call, pending.is_error, pending.answer = None, is_error, bytes(self.channel.payload(received))
        for request in pending.arriving:  # nothing comes for them: the answer is an error
            request.Cancel()
            request.Free()
        pending.arriving.clear()


def _raise_first_error(asked: Sequence[_Pending]) -> None:
    for one in asked:
        if one.is_error:
            raise loads_error(one.answer)


def _unpickled_ref(*fields: Any) -> VariableRef:
    """Return what was pickled; on the chief its own object, which keeps the variable."""
    ref = VariableRef(*fields)
    client = _clients.get(ref.group)
    return ref if client is None else client.refs.get(ref.number, ref)


def current_client(group: int) -> Client:
    """Return the client of this process in a group of tasks, given by its number."""
    if group not in _clients:
        raise RuntimeError(
            "variables on servers can be used on the chief and in scheduled functions; this process has no connection to the "
            "servers: it is one of them, or the strategy that made the variable was closed. A function that extended.update "
            "calls on a server gets the variable as its first argument"
        )
    return _clients[group]


def open_clients() -> list[Client]:
    """Return the clients of this process that are not closed: the other ranks of their groups serve."""
    return list(_clients.values())
