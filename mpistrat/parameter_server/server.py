"""What servers and workers run until the chief ends them: one loop, in which servers answer requests and workers run functions.

Invariant: a request changes a variable only when no answer is being sent from its array, so nobody reads half an update; and
where the job survives the loss of ranks, only when all of it has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import OutOfRangeError, UnavailableError
from mpistrat.groups.agreement import pause
from mpistrat.groups.group import keep_alive_for_peers
from mpistrat.parameter_server import messages
from mpistrat.parameter_server.client import Client
from mpistrat.parameter_server.functions import dumps, dumps_error, loads, loads_on
from mpistrat.parameter_server.messages import REPLY, REQUEST, RESULT, Channel, Message, Received, Receiver
from mpistrat.parameter_server.variables import StoredVariable
from mpistrat.state.changes import ASSIGNMENTS, SCATTERS, apply, assign_to
from mpistrat.strategy.strategy import Strategy

_MOST_SENDS = 32  # before those that have ended are looked for, where requests come without a pause


class FailedResource(NamedTuple):
    """Stands on a worker for what could not be made: functions that use it raise the error."""

    error: Exception
    trace: Any


class _FreedError(Exception):
    """The variable of a request was freed: a rank that is lost had asked, since all others have forgotten it."""


class _Sending(NamedTuple):
    """What is being sent to a rank: from the array of a variable, or from memory of its own (-1)."""

    rank: int
    requests: list[messages.Request]
    variable: int


class _Task:
    """The loop: does what it is told, one after the other."""

    idle: str
    handlers: ClassVar[dict[type, Callable[[Any, Any, Received], None]]]  # of messages

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        # what loads a function, for a worker or for a server, when it is first called
        self._functions: dict[tuple[int, int], Callable[[int | None], Callable[..., Any]]] = {}
        self._is_stopped = False
        self._sends: list[_Sending] = []

    def serve(self) -> None:
        """Do what is asked for until the chief says that the job is done."""
        receiver = Receiver(self.channel, REQUEST)
        try:
            self._serve_until_stopped(receiver)
        finally:
            receiver.close()
            keep_alive_for_peers(self._sends)  # of ranks that have given up what they had asked for: all others have it

    def _serve_until_stopped(self, receiver: Receiver) -> None:
        self.channel.activity.set(self.idle)
        began = time.monotonic()
        while (received := receiver.poll()) is not None or not self._is_stopped:
            if received is None:
                self._sends = self._unfinished()
                self.channel.check(self.channel.group.chief)
                pause(began)
            else:
                with suppress(UnavailableError, _FreedError):  # whoever has asked is lost
                    self.handlers[type(received.message)](self, received.message, received)
                began = time.monotonic()
        self.channel.report_end()
        self._sends = self._unfinished()
        self.channel.activity.set("")

    def _define(self, message: messages.Define, received: Received) -> None:
        self._functions.pop((received.source, message.forgotten), None)
        data = bytes(self.channel.payload(received))
        self._functions[received.source, message.function] = cache(lambda worker: loads_on(worker, data))

    def _stop(self, message: messages.Stop, received: Received) -> None:
        self._is_stopped = True

    def _send_result(self, rank: int, tag: int, call: int, run: Callable[[], bytes]) -> None:
        """Call a function, and send the result that it returns as bytes, or its error."""
        is_error = False
        try:
            answer = run()
        except Exception as error:
            is_error, answer = True, dumps_error(error, self.channel.name)
        self.channel.activity.set(self.idle)
        self._send(rank, tag, messages.Result(call, is_error), answer)

    def _send(self, rank: int, tag: int, message: Message, payload: bytes = b"") -> None:
        self._keep_sending(rank, self.channel.send(rank, tag, message, payload))

    def _keep_sending(self, rank: int, requests: list[messages.Request], variable: int = -1) -> None:
        if not self.channel.have_ended(requests, []):
            if len(self._sends) >= _MOST_SENDS:
                self._sends = self._unfinished()
            self._sends.append(_Sending(rank, requests, variable))

    def _unfinished(self) -> list[_Sending]:
        return [one for one in self._sends if not self.channel.have_ended(one.requests, [])]


class VariableServer(_Task):
    """A server: keeps variables, and answers requests for them."""

    idle = "waits for requests"

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._variables: dict[int, StoredVariable] = {}

    def _create(self, message: messages.Create, received: Received) -> None:
        name, dtype, shape = loads(self.channel.payload(received))
        self._variables[message.variable] = StoredVariable(name, np.zeros(shape, dtype))

    def _free(self, message: messages.Free, received: Received) -> None:
        del self._variables[message.variable]

    def _read(self, message: messages.Read, received: Received) -> None:
        array = self._variable(message.variable).value
        rows = array[message.start : message.stop] if array.ndim else array
        self._keep_sending(received.source, self.channel.send_bare(rows, received.source), message.variable)

    def _read_rows(self, message: messages.ReadRows, received: Received) -> None:
        asked = np.frombuffer(self.channel.payload(received), np.int64)
        start = 2 * message.num_variables
        found = []
        for number, num_rows in asked[:start].reshape(2, -1).T.tolist():
            found.append(self._variable(number).value.take(asked[start : start + num_rows], axis=0))
            start += num_rows
        rows = found[0] if len(found) == 1 else np.concatenate(found)
        self._keep_sending(received.source, self.channel.send_bare(rows, received.source))

    def _write(self, message: messages.Write, received: Received) -> None:
        array, method = self._unread(message.variable).value, ASSIGNMENTS[message.method]
        target = array[message.start : message.stop] if array.ndim else array
        if method == "assign" and not self.channel.survives:
            self.channel.receive_payload(received, target)
            return
        assign_to(target, method, self._value(received, target))

    def _scatter(self, message: messages.Scatter, received: Received) -> None:
        array = self._unread(message.variable).value
        indices, rows = np.empty(message.num_rows, np.int64), np.empty((message.num_rows, *array.shape[1:]), array.dtype)
        self.channel.receive_payload(received, indices, rows)
        apply(SCATTERS[message.method], array, (rows, indices))

    def _update(self, message: messages.Update, received: Received) -> None:
        """Call a function with a variable, and answer what it returns, or its error."""
        data, variable = self.channel.payload(received), self._unread(message.variable)

        def run() -> bytes:
            args, kwargs, wants_result = loads(data)
            fn = self._functions[received.source, message.function](None)
            self.channel.activity.set(f"runs {_name(fn)} on {variable.name}")
            result = fn(variable, *args, **kwargs)
            return dumps(result, f"the result of an update of {variable!r}") if wants_result else b""

        self._send_result(received.source, REPLY, message.call, run)

    def _flush(self, message: messages.Flush, received: Received) -> None:
        self._keep_sending(received.source, self.channel.send_bare(b"\0", received.source))

    def _variable(self, number: int) -> StoredVariable:
        try:
            return self._variables[number]
        except KeyError:
            raise _FreedError from None

    def _unread(self, number: int) -> StoredVariable:
        """Return a variable when nothing is being sent from its array."""
        for one in [one for one in self._sends if one.variable == number]:
            what = partial("{}, to take what it has read".format, self.channel.group.names[one.rank])
            with suppress(UnavailableError):  # it takes nothing any more
                self.channel.wait(one.requests, what, has_deadline=False)
        return self._variable(number)

    def _value(self, received: Received, like: Array) -> Array:
        """Return the payload as an array of a shape: where it is inline, without a copy."""
        if received.inline is not None:
            return np.frombuffer(received.inline, like.dtype).reshape(like.shape)
        value = np.empty_like(like)
        self.channel.receive_payload(received, value)
        return value

    handlers: ClassVar = {
        **{messages.Create: _create, messages.Free: _free, messages.Define: _Task._define, messages.Stop: _Task._stop},
        **{messages.Read: _read, messages.ReadRows: _read_rows, messages.Write: _write, messages.Scatter: _scatter},
        **{messages.Update: _update, messages.Flush: _flush},
    }


class Worker(_Task):
    """A worker: runs functions in the scope of its strategy, one after the other."""

    idle = "waits for a function"

    def __init__(self, client: Client, strategy: Strategy) -> None:
        super().__init__(client.channel)
        self._client, self._strategy = client, strategy

    def _run(self, message: messages.Run, received: Received) -> None:
        run = partial(self._result, message, received)
        returned = partial(self._keep, message.call, run) if message.is_kept else partial(_pickled, run)
        self._send_result(received.source, RESULT, message.call, returned)

    def _forget(self, message: messages.Forget, received: Received) -> None:
        dropped = loads(self.channel.payload(received))
        for call in [one for one in dropped if type(one) is int]:
            self._client.resources.pop(call, None)
        self._client.forget([one for one in dropped if type(one) is tuple])
        self._send(received.source, RESULT, messages.Forgotten(message.batch))

    def _keep(self, call: int, run: Callable[[], tuple[Any, Any]]) -> bytes:
        """Keep what a function returns, or its error, for functions to come."""
        try:
            _, self._client.resources[call] = run()
        except Exception as error:
            self._client.resources[call] = FailedResource(error, error.__traceback__)
        return b""

    def _result(self, message: messages.Run, received: Received) -> tuple[Any, Any]:
        """Return a function, and what it returns; what it has written the servers have done then, also where it raises."""
        data = self.channel.payload(received)
        try:
            with self._strategy.scope():
                args, kwargs = loads_on(message.worker, data)
                fn = self._functions[received.source, message.function](message.worker)
                self.channel.activity.set(f"runs {_name(fn)} (function {message.function})")
                result = fn(*args, **kwargs)
        except Exception:
            with suppress(Exception):  # the error of the function is the one to tell
                self._client.flush()
            raise
        self._client.flush()
        return fn, result

    handlers: ClassVar = {
        **{messages.Define: _Task._define, messages.Stop: _Task._stop},
        **{messages.Run: _run, messages.Forget: _forget},
    }


def _pickled(run: Callable[[], tuple[Any, Any]]) -> bytes:
    try:
        fn, result = run()
    except StopIteration as error:
        raise OutOfRangeError("the dataset of the worker has ended") from error
    return dumps(result, f"the result of function {_name(fn)}")


def _name(fn: Callable[..., Any]) -> object:
    return getattr(fn, "__qualname__", fn)
