"""What servers and workers run until the chief ends them: one loop, in which servers answer requests and workers run functions.

Invariant: a request changes a variable only when no answer is being sent from its array, so nobody reads half an update; and
where the job survives the loss of ranks, only when all of it has arrived.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import OutOfRangeError, UnavailableError
from mpistrat.groups.agreement import pause
from mpistrat.groups.group import keep_alive_for_peers
from mpistrat.launch.end_of_job import ENDING, Signals
from mpistrat.parameter_server import messages
from mpistrat.parameter_server.client import Client
from mpistrat.parameter_server.functions import dumps, dumps_error, loads, loads_on
from mpistrat.parameter_server.messages import REPLY, REQUEST, RESULT, Channel, Received, Receiver
from mpistrat.parameter_server.variables import StoredVariable
from mpistrat.state.changes import METHODS, apply

_DROPPED = "the variable was dropped by the chief, and its server has freed it: keep it there for as long as functions use it"
_MOST_SENDS = 32  # before those that have ended are looked for, where requests come without a pause


class _Sending(NamedTuple):
    """What is being sent to a rank: from the array of a variable, or from memory of its own (-1)."""

    rank: int
    requests: list[messages.Request]
    variable: int


class _Task:
    """The loop: does what messages ask for, one after the other. The method that does it has the name of the message."""

    idle: str
    answers: int  # their tag

    def __init__(self, channel: Channel, kept: dict[int, Any]) -> None:
        self.channel = channel
        self._kept = kept  # until the chief drops it, by its number: variables, or what functions have made
        # what loads a function, for a worker or for a server, when it is first called
        self._functions: dict[tuple[int, int], Callable[[int | None], Callable[..., Any]]] = {}
        self._methods: dict[type, Any] = {kind: getattr(type(self), kind.__name__.lower(), None) for kind in messages.KINDS}
        self._is_stopped = False
        self._sends: list[_Sending] = []

    def serve(self) -> None:
        """Do what is asked for until the chief says that the job is done."""
        receiver = Receiver(self.channel, REQUEST)
        self.channel.record(self.idle)
        began, is_main = time.monotonic(), threading.current_thread() is threading.main_thread()
        # when the whole job is told to end, its chief may still save what the servers keep
        signals = Signals([number for number in ENDING if is_main and signal.getsignal(number) == signal.SIG_DFL])
        try:
            while (received := receiver.poll()) is not None or not self._is_stopped:
                if received is None:
                    self._sends = self._unfinished()
                    self.channel.check(self.channel.chief)
                    pause(began)
                else:
                    with suppress(UnavailableError):  # whoever has asked is lost
                        self._methods[type(received.message)](self, received.message, received)
                    began = time.monotonic()
            self.channel.report_end()
            self._sends = self._unfinished()
            self.channel.record("")
        finally:
            signals.restore()
            receiver.close()
            keep_alive_for_peers(self._sends)  # of ranks that have given up what they had asked for: all others have it

    def define(self, message: messages.Define, received: Received) -> None:
        self._functions.pop((received.source, message.forgotten), None)
        data = bytes(self.channel.payload(received))
        self._functions[received.source, message.function] = cache(lambda worker: loads_on(worker, data))

    def forget(self, message: messages.Forget, received: Received) -> None:
        for number in loads(self.channel.payload(received)):
            self._kept.pop(number, None)

    def stop(self, message: messages.Stop, received: Received) -> None:
        self._is_stopped = True

    def _function(self, source: int, number: int, worker: int | None, where: str = "") -> Callable[..., Any]:
        """Return a function that a rank has sent, which runs from now on."""
        fn = self._functions[source, number](worker)
        self.channel.record(f"runs {_name(fn)} {where or f'(function {number})'}")
        return fn

    def _answer(self, received: Received, call: int, run: Callable[[], bytes]) -> None:
        """Call a function, and answer the bytes that it returns, or its error."""
        answer: bytes | Exception
        try:
            answer = run()
        except SystemExit as error:
            if error.code:  # it ends the job
                raise
            answer = RuntimeError(f"a function that {self.channel.name} ran wanted to end it: {error!r}")
            answer.__traceback__ = error.__traceback__
        except Exception as error:
            answer = error
        self.channel.record(self.idle)
        self._send_result(received.source, call, answer)

    def _send_result(self, rank: int, call: int, answer: bytes | Exception) -> None:
        is_error = isinstance(answer, Exception)
        data = dumps_error(answer, self.channel.name) if isinstance(answer, Exception) else answer
        self._keep_sending(rank, self.channel.send([], rank, self.answers, messages.Result(call, is_error), data))

    def _keep_sending(self, rank: int, requests: list[messages.Request], variable: int = -1) -> None:
        if not self.channel.have_ended(requests, []):
            if len(self._sends) >= _MOST_SENDS:
                self._sends = self._unfinished()
            self._sends.append(_Sending(rank, requests, variable))

    def _unfinished(self) -> list[_Sending]:
        return [one for one in self._sends if not self.channel.have_ended(one.requests, [])]


class VariableServer(_Task):
    """A server: keeps variables, and answers requests for them."""

    idle, answers = "waits for requests", REPLY

    def __init__(self, channel: Channel) -> None:
        self._variables: dict[int, StoredVariable] = {}
        super().__init__(channel, self._variables)
        self._failed: dict[int, Exception] = {}  # the first error in what a rank has asked for, until it hears of that

    def create(self, message: messages.Create, received: Received) -> None:
        data = self.channel.payload(received)

        def create() -> bytes:
            name, dtype, shape = loads(data)
            self._variables[message.variable] = StoredVariable(name, np.zeros(shape, dtype))
            return b""

        self._answer(received, message.variable, create)

    def read(self, message: messages.Read, received: Received) -> None:
        def rows(array: Array) -> Array:
            return array[message.start : message.stop] if array.ndim else array

        self._send_rows(received, rows, message.variable)

    def gather(self, message: messages.Gather, received: Received) -> None:
        asked = np.frombuffer(self.channel.payload(received), np.int64)
        self._send_rows(received, lambda array: array.take(asked, axis=0))

    def write(self, message: messages.Write, received: Received) -> None:
        method = METHODS[message.method]
        if method == "assign" and message.variable in self._variables and not self.channel.survives:
            self.channel.receive_payload(received, self._unread(message.variable).value)
            return
        indices = np.empty(message.num_indices, np.int64)
        data = np.empty(received.nbytes - indices.nbytes, np.uint8)
        self.channel.receive_payload(received, indices, data)
        try:
            array = self._unread(message.variable).value
            values = data.view(array.dtype)
            if len(indices):
                apply(method, array, (values.reshape(len(indices), *array.shape[1:]), indices))
            else:
                apply(method, array, (values.reshape(array.shape),))
        except Exception as error:  # such as an overflow, where the program makes that one; it is told with the next `Flush`
            self._failed.setdefault(received.source, error)

    def run(self, message: messages.Run, received: Received) -> None:
        data = self.channel.payload(received)

        def run() -> bytes:
            variable, (args, kwargs) = self._unread(message.target), loads(data)
            fn = self._function(received.source, message.function, None, f"on {variable.name}")
            result = fn(variable, *args, **kwargs)
            return dumps(result, f"the result of an update of {variable!r}") if message.wants_result else b""

        self._answer(received, message.call, run)

    def flush(self, message: messages.Flush, received: Received) -> None:
        self._send_result(received.source, message.call, self._failed.pop(received.source, b""))

    def _send_rows(self, received: Received, rows: Callable[[Array], Array], variable: int = -1) -> None:
        """Answer a call with what a function finds in its variable, without a header, or with its error."""
        source, message = received.source, received.message
        try:
            found = rows(self._variable(message.variable).value)
        except Exception as error:
            self._send_result(source, message.call, error)
        else:
            self._keep_sending(source, self.channel.send_bare(source, message.call, found), variable)

    def _variable(self, number: int) -> StoredVariable:
        if number not in self._variables:
            raise RuntimeError(_DROPPED)
        return self._variables[number]

    def _unread(self, number: int) -> StoredVariable:
        """Return a variable when nothing is being sent from its array."""
        for one in [one for one in self._sends if one.variable == number]:
            what = partial("{}, to take what it has read".format, self.channel.names[one.rank])
            with suppress(UnavailableError):  # it takes nothing any more
                self.channel.wait(one.requests, what, has_deadline=False)
        return self._variable(number)


class Worker(_Task):
    """A worker: runs functions in the scope of its strategy, one after the other."""

    idle, answers = "waits for a function", RESULT

    def __init__(self, client: Client) -> None:
        super().__init__(client.channel, client.resources)
        self._client = client

    def run(self, message: messages.Run, received: Received) -> None:
        data = self.channel.payload(received)

        def run() -> bytes:
            try:
                fn, result = self._result(message, received.source, data)
            except Exception as error:
                if not message.wants_result:  # functions that use what could not be made raise the error
                    self._kept[message.call] = partial(_raise, error, error.__traceback__)
                    return b""
                if isinstance(error, StopIteration):
                    raise OutOfRangeError("the dataset of the worker has ended") from error
                raise
            if message.wants_result:
                return dumps(result, f"the result of function {_name(fn)}")
            self._kept[message.call] = lambda: result
            return b""

        self._answer(received, message.call, run)

    def _result(self, message: messages.Run, source: int, data: messages.Buffer) -> tuple[Any, Any]:
        """Return a function, and what it returns; what it has written the servers have done then, also where it raises."""
        try:
            with self._client.strategy.scope():
                args, kwargs = loads_on(message.target, data)
                fn = self._function(source, message.function, message.target)
                result = fn(*args, **kwargs)
        except Exception:
            with suppress(Exception):  # the error of the function is the one to tell
                self._client.flush()
            raise
        self._client.flush()
        return fn, result


def _raise(error: Exception, trace: Any) -> NoReturn:
    raise error.with_traceback(trace)


def _name(fn: Callable[..., Any]) -> object:
    return getattr(fn, "__qualname__", fn)
