"""Worker: runs the functions that the chief sends, one after the other, until the chief ends it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mpistrat.errors import OutOfRangeError
from mpistrat.groups.agreement import pause
from mpistrat.parameter_server.client import Client
from mpistrat.parameter_server.frames import REQUEST, RESULT, Frame, FrameReceiver, Op
from mpistrat.parameter_server.functions import dumps, dumps_error, loads
from mpistrat.strategy.strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Worker"]

_IDLE = "waits for a function"


class _Task(NamedTuple):
    """A function to run: its number, that of the call, in which epoch of the coordinator, and the arguments."""

    call: int
    function: int
    epoch: int
    makes_resource: bool
    arguments: bytes


class Worker:
    """The loop of a worker.

    Parameters
    ----------
    client : Client
        To the servers, for the functions.
    strategy : Strategy
        In whose scope functions run.
    """

    def __init__(self, client: Client, strategy: Strategy) -> None:
        self._client, self._channel, self._strategy = client, client.channel, strategy
        self._functions: dict[int, bytes | Callable[..., Any]] = {}
        self._tasks: deque[Callable[[], object]] = deque()
        self._sends: list[MPI.Request] = []
        self._cancelled = -1
        self._is_stopped = False

    def serve(self) -> None:
        """Run functions until the chief says that the job is done.

        Raises
        ------
        UnavailableError
            If the chief is lost.
        """
        receiver, began = FrameReceiver(self._channel, REQUEST), time.monotonic()
        self._channel.activity.set(_IDLE)
        while True:
            # whatever has come is looked at before a function is run: it may cancel that
            frame = receiver.poll()
            if frame is not None:
                self._take(frame)
            elif self._tasks:
                self._tasks.popleft()()
                began = time.monotonic()
            elif self._is_stopped:
                break
            else:
                self._sends = self._channel.left(self._sends)
                self._channel.check(self._channel.group.chief)
                pause(began)
        self._answer(Op.STOPPED, 0)
        self._channel.wait(self._sends, lambda: "the chief, to take results", has_deadline=False)
        self._channel.activity.set("")
        receiver.close()

    def _take(self, frame: Frame) -> None:
        if frame.op == Op.DEFINE:
            self._functions[frame.first] = bytes(self._channel.payload(frame, REQUEST))
        elif frame.op == Op.FORGET:
            if frame.method:  # after the functions that have come before, some of which may work on it
                self._tasks.append(partial(self._client.resources.pop, frame.first, None))
            else:
                self._functions.pop(frame.first, None)
        elif frame.op in (Op.RUN, Op.MAKE):
            arguments = bytes(self._channel.payload(frame, REQUEST))
            task = _Task(frame.first, frame.second, frame.variable, frame.op == Op.MAKE, arguments)
            self._tasks.append(partial(self._run, task))
        elif frame.op == Op.CANCEL:
            self._cancelled = frame.first
        else:
            self._is_stopped = True
            self._cancelled = max(self._cancelled, frame.first)

    def _run(self, task: _Task) -> None:
        if task.epoch <= self._cancelled and not task.makes_resource:
            self._answer(Op.CANCELLED, task.call)
            return
        op = Op.DONE
        try:
            try:
                answer = self._result(task)
            finally:
                self._client.flush()
        except Exception as error:
            op, answer = Op.FAILED, dumps_error(_of_function(error), self._channel.name)
        self._channel.activity.set(_IDLE)
        self._answer(op, task.call, answer)

    def _result(self, task: _Task) -> bytes:
        """Run a function, and return its result as bytes; what is kept here instead has an empty one."""
        with self._strategy.scope():
            args, kwargs = loads(task.arguments)
            fn = self._functions[task.function]
            if isinstance(fn, bytes):
                fn = self._functions[task.function] = loads(fn)
            self._channel.activity.set(f"runs {getattr(fn, '__qualname__', fn)} (function {task.function})")
            result = fn(*args, **kwargs)
        if task.makes_resource:
            self._client.resources[task.call] = result
            return b""
        return dumps(result, f"the result of function {getattr(fn, '__qualname__', fn)}")

    def _answer(self, op: int, call: int, answer: bytes = b"") -> None:
        self._sends += self._channel.send(self._channel.group.chief, RESULT, op, answer, first=call)


def _of_function(error: Exception) -> Exception:
    """Return an error as the chief raises it: the end of a dataset by the name that it has there."""
    if type(error) is not StopIteration:
        return error
    ended = OutOfRangeError("the dataset of the worker has ended")
    ended.__cause__ = error
    return ended
