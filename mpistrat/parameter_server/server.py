"""What servers and workers run until the chief ends them: one loop, in which servers answer requests and workers run functions.

Invariant: a request changes a variable only when no answer is being sent from its array, so nobody reads half an update; and
where the job survives the loss of ranks, only when all of it has arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import OutOfRangeError, UnavailableError
from mpistrat.groups.agreement import pause
from mpistrat.groups.group import keep_alive_for_peers
from mpistrat.parameter_server.client import Client
from mpistrat.parameter_server.functions import dumps, dumps_error, loads
from mpistrat.parameter_server.messages import (
    REPLY,
    REQUEST,
    RESULT,
    SCATTERS,
    WRITES,
    Answer,
    Cancel,
    Cancelled,
    Channel,
    Create,
    Define,
    Flush,
    ForgetFunction,
    ForgetResource,
    ForgetVariables,
    Forgotten,
    Free,
    Message,
    Read,
    ReadRows,
    Received,
    Receiver,
    Result,
    Run,
    Scatter,
    Stop,
    Update,
    Write,
)
from mpistrat.parameter_server.variables import StoredVariable
from mpistrat.state.scatter import apply
from mpistrat.strategy.strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["FailedResource", "VariableServer", "Worker"]

_MOST_SENDS = 32  # before those that have ended are looked for, where requests come without a pause


class FailedResource(NamedTuple):
    """Stands on a worker for what could not be made: functions that use it raise the error."""

    error: Exception
    trace: Any


class _FreedError(Exception):
    """The variable of a request was freed: a rank that is lost had asked, since all others have forgotten it."""


class _Sending(NamedTuple):
    """An answer that is being sent to a rank, from the array of a variable; -1 if from memory of its own."""

    rank: int
    requests: list[MPI.Request]
    variable: int


class _Task:
    """The loop: looks at whatever has come, then runs what that has left to do, one after the other."""

    idle: str
    handlers: dict[type, Callable[[Any, Received], None]]  # of messages

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.to_do: deque[Callable[[], object]] = deque()
        self.is_stopped = False
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
        while True:
            # whatever has come is looked at before a function is run: it may cancel that
            received = receiver.poll()
            if received is not None:
                with suppress(UnavailableError, _FreedError):  # whoever has asked is lost
                    self.handlers[type(received.message)](self, received)
            elif self.to_do:
                self.to_do.popleft()()
            elif self.is_stopped:
                break
            else:
                self._sends = self._left()
                self.channel.check(self.channel.group.chief)
                pause(began)
                continue
            began = time.monotonic()
        self.channel.report_end()
        self._sends = self._left()
        self.channel.activity.set("")

    def answer(self, rank: int, requests: list[MPI.Request], variable: int = -1) -> None:
        """Keep what is being sent until it has left."""
        if not self.channel.left(requests):
            return
        if len(self._sends) >= _MOST_SENDS:
            self._sends = self._left()
        self._sends.append(_Sending(rank, requests, variable))

    def finish_sends(self, variable: int) -> None:
        """Wait until nothing is being sent from the array of a variable."""
        if self._sends:
            for one in [one for one in self._sends if one.variable == variable]:
                what = partial("{}, to take what it has read".format, self.channel.group.names[one.rank])
                with suppress(UnavailableError):  # it takes nothing any more
                    self.channel.wait(one.requests, what, has_deadline=False)

    def _left(self) -> list[_Sending]:
        return [one for one in self._sends if self.channel.left(one.requests)]


class VariableServer(_Task):
    """A server: keeps variables, and answers requests for them."""

    idle = "waits for requests"

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._variables: dict[int, StoredVariable] = {}
        self._functions: dict[tuple[int, int], Callable[..., Any]] = {}

    def _create(self, received: Received) -> None:
        name, dtype, shape = loads(self.channel.payload(received, REQUEST))
        self._variables[received.message.variable] = StoredVariable(name, np.zeros(shape, dtype))

    def _free(self, received: Received) -> None:
        del self._variables[received.message.variable]

    def _read(self, received: Received) -> None:
        message: Read = received.message
        array = self._variable(message.variable).value
        rows = array[message.start : message.stop] if array.ndim else array
        self.answer(received.source, self.channel.send_bare(rows, received.source, REPLY), message.variable)

    def _read_rows(self, received: Received) -> None:
        num_variables = received.message.num_variables
        asked = np.frombuffer(self.channel.payload(received, REQUEST), np.int64)
        numbers, counts = asked[: 2 * num_variables].reshape(2, -1).tolist()
        found, start = [], 2 * num_variables
        for number, count in zip(numbers, counts, strict=True):
            found.append(self._variable(number).value.take(asked[start : start + count], axis=0))
            start += count
        rows = found[0] if len(found) == 1 else np.concatenate(found)
        self.answer(received.source, self.channel.send_bare(rows, received.source, REPLY))

    def _write(self, received: Received) -> None:
        message: Write = received.message
        array, method = self._changed(message.variable).value, WRITES[message.method]
        target = array[message.start : message.stop] if array.ndim else array
        if method == "assign" and not self.channel.survives:
            self.channel.receive_payload(received, REQUEST, target)
            return
        value = self._value(received, target)
        if method == "assign":
            target[...] = value
        else:
            (np.add if method == "assign_add" else np.subtract)(target, value, out=target)

    def _scatter(self, received: Received) -> None:
        message: Scatter = received.message
        array = self._changed(message.variable).value
        indices, rows = np.empty(message.num_rows, np.int64), np.empty((message.num_rows, *array.shape[1:]), array.dtype)
        self.channel.receive_payload(received, REQUEST, indices, rows)
        apply(SCATTERS[message.method], array, (rows, indices))

    def _update(self, received: Received) -> None:
        """Call a function with a variable, and answer what it returns, or its error."""
        message: Update = received.message
        data, variable, is_error = self.channel.payload(received, REQUEST), self._changed(message.variable), False
        try:
            args, kwargs, wants_result = loads(data)
            fn = self._functions[received.source, message.function]
            self.channel.activity.set(f"runs {getattr(fn, '__qualname__', fn)} on {variable.name}")
            result = fn(variable, *args, **kwargs)
            answer = dumps(result, f"the result of an update of {variable!r}") if wants_result else b""
        except Exception as error:
            is_error, answer = True, dumps_error(error, self.channel.name)
        self.channel.activity.set(self.idle)
        self.answer(received.source, self.channel.send(received.source, REPLY, Answer(message.number, is_error), answer))

    def _flush(self, received: Received) -> None:
        self.answer(received.source, self.channel.send_bare(b"\0", received.source, REPLY))

    def _define(self, received: Received) -> None:
        fn = _loaded(bytes(self.channel.payload(received, REQUEST)))
        self._functions[received.source, received.message.function] = fn

    def _forget_function(self, received: Received) -> None:
        self._functions.pop((received.source, received.message.function), None)

    def _stop(self, received: Received) -> None:
        self.is_stopped = True

    def _variable(self, number: int) -> StoredVariable:
        try:
            return self._variables[number]
        except KeyError:
            raise _FreedError from None

    def _changed(self, number: int) -> StoredVariable:
        """Return a variable that nobody reads now."""
        self.finish_sends(number)
        return self._variable(number)

    def _value(self, received: Received, like: Array) -> Array:
        """Return the payload as an array of a shape: where it is inline, without a copy."""
        if received.inline is not None:
            return np.frombuffer(received.inline, like.dtype).reshape(like.shape)
        value = np.empty_like(like)
        self.channel.receive_payload(received, REQUEST, value)
        return value

    handlers = {  # noqa: RUF012
        Create: _create,
        Free: _free,
        Read: _read,
        ReadRows: _read_rows,
        Write: _write,
        Scatter: _scatter,
        Update: _update,
        Flush: _flush,
        Define: _define,
        ForgetFunction: _forget_function,
        Stop: _stop,
    }


class Worker(_Task):
    """A worker: runs functions in the scope of its strategy, one after the other."""

    idle = "waits for a function"

    def __init__(self, client: Client, strategy: Strategy) -> None:
        super().__init__(client.channel)
        self._client, self._strategy = client, strategy
        self._functions: dict[int, bytes | Callable[..., Any]] = {}
        self._cancelled = -1

    def _define(self, received: Received) -> None:
        self._functions[received.message.function] = bytes(self.channel.payload(received, REQUEST))

    def _forget_function(self, received: Received) -> None:
        self._functions.pop(received.message.function, None)

    # after the functions that have come before, some of which may work on it

    def _forget_resource(self, received: Received) -> None:
        self.to_do.append(partial(self._client.resources.pop, received.message.call, None))

    def _forget_variables(self, received: Received) -> None:
        keys = loads(self.channel.payload(received, REQUEST))

        def forget() -> None:
            self._client.forget(keys)
            self._tell(Forgotten(received.message.batch))

        self.to_do.append(forget)

    def _run(self, received: Received) -> None:
        self.to_do.append(partial(self._call, received.message, bytes(self.channel.payload(received, REQUEST))))

    def _cancel(self, received: Received) -> None:
        self._cancelled = received.message.epoch

    def _stop(self, received: Received) -> None:
        self.is_stopped = True
        self._cancelled = max(self._cancelled, received.message.epoch)

    def _call(self, run: Run, arguments: bytes) -> None:
        if run.epoch <= self._cancelled and not run.is_kept:
            self._tell(Cancelled(run.call))
            return
        is_error = False
        try:
            try:
                answer = self._result(run, arguments)
            except Exception:
                with suppress(Exception):  # the error of the function is the one to tell
                    self._client.flush()
                raise
            self._client.flush()
        except Exception as error:
            if run.is_kept:
                self._client.resources[run.call], answer = FailedResource(error, error.__traceback__), b""
            else:
                is_error, answer = True, dumps_error(_of_function(error), self.channel.name)
        self.channel.activity.set(self.idle)
        self._tell(Result(run.call, is_error), answer)

    def _result(self, run: Run, arguments: bytes) -> bytes:
        """Run a function, and return its result as bytes; what is kept here instead has an empty one."""
        with self._strategy.scope():
            args, kwargs = loads(arguments)
            fn = self._functions[run.function]
            if isinstance(fn, bytes):
                fn = self._functions[run.function] = loads(fn)
            self.channel.activity.set(f"runs {getattr(fn, '__qualname__', fn)} (function {run.function})")
            result = fn(*args, **kwargs)
        if run.is_kept:
            self._client.resources[run.call] = result
            return b""
        return dumps(result, f"the result of function {getattr(fn, '__qualname__', fn)}")

    def _tell(self, message: Message, answer: bytes = b"") -> None:
        """Tell the chief."""
        chief = self.channel.group.chief
        self.answer(chief, self.channel.send(chief, RESULT, message, answer))

    handlers = {  # noqa: RUF012
        Define: _define,
        ForgetFunction: _forget_function,
        ForgetResource: _forget_resource,
        ForgetVariables: _forget_variables,
        Run: _run,
        Cancel: _cancel,
        Stop: _stop,
    }


def _of_function(error: Exception) -> Exception:
    """Return an error as the chief raises it: the end of a dataset by the name that it has there."""
    if type(error) is not StopIteration:
        return error
    ended = OutOfRangeError("the dataset of the worker has ended")
    ended.__cause__ = error
    return ended


def _loaded(data: bytes) -> Callable[..., Any]:
    """Return a function; one that cannot be loaded here says so when it is called."""
    try:
        fn: Callable[..., Any] = loads(data)
    except Exception as error:
        found = error

        def fn(*args: Any, **kwargs: Any) -> Any:
            raise TypeError(f"the function cannot be loaded on this rank: {type(found).__name__}: {found}") from found

    return fn
