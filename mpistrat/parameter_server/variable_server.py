"""VariableServer: answers requests for the variables of one server, one after the other, until the chief ends it.

File law: a request changes a variable only when no answer is being sent from its array, and under its sequence lock, so nobody
reads half an update; and where the job survives the loss of ranks, only when all of it has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import UnavailableError
from mpistrat.groups.agreement import pause
from mpistrat.parameter_server.frames import REPLY, REQUEST, RESULT, Channel, Frame, FrameReceiver, Op
from mpistrat.parameter_server.functions import dumps, dumps_error, loads
from mpistrat.parameter_server.shared_arrays import ArrayAddress, SequenceLock, SharedArrays
from mpistrat.parameter_server.stored_variable import SCATTER_METHODS, StoredVariable
from mpistrat.state.scatter import apply

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["VariableServer"]

_IDLE = "waits for requests"
_MOST_SENDS = 32  # before those that have ended are looked for, where requests come without a pause


class VariableServer:
    """The request loop of a server.

    Parameters
    ----------
    channel : Channel
        To the other tasks.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._shared = SharedArrays(channel.comm.Get_size())
        self._variables: list[StoredVariable] = []
        self._locks: list[SequenceLock] = []
        self._addresses: list[ArrayAddress | None] = []
        self._functions: dict[tuple[int, int], Callable[..., Any]] = {}
        self._sends: list[tuple[int, list[MPI.Request]]] = []
        self._handlers: dict[int, Callable[[Frame], None]] = {
            Op.CREATE: self._create,
            Op.LOCATE: self._locate,
            Op.READ: self._read,
            Op.READ_NEWER: self._read_newer,
            Op.READ_ROWS: self._read_rows,
            Op.ASSIGN: self._write,
            Op.ASSIGN_ADD: self._write,
            Op.ASSIGN_SUB: self._write,
            Op.SCATTER: self._scatter,
            Op.UPDATE: self._update,
            Op.FLUSH: self._flush,
            Op.DEFINE: self._define,
            Op.FORGET: self._forget,
        }

    def serve(self) -> None:
        """Answer requests until the chief says that the job is done.

        Raises
        ------
        UnavailableError
            If the chief is lost.
        """
        receiver, began = FrameReceiver(self._channel, REQUEST), time.monotonic()
        self._channel.activity.set(_IDLE)
        while True:
            frame = receiver.poll()
            if frame is None:
                self._sends = self._left()
                self._channel.check(self._channel.group.chief)
                pause(began)
                continue
            if frame.op == Op.STOP:
                break
            with suppress(UnavailableError):  # whoever has asked is lost
                self._handlers[frame.op](frame)
            began = time.monotonic()
        self._finish_sends(None)
        self._answer(self._channel.send(frame.source, RESULT, Op.STOPPED))
        self._finish_sends(None)
        receiver.close()
        self._channel.activity.set("")

    def _create(self, frame: Frame) -> None:
        name, dtype, shape = loads(self._channel.payload(frame, REQUEST))
        array, lock, address = self._shared.allocate(shape, np.dtype(dtype))
        self._variables.append(StoredVariable(name, array))
        self._locks.append(lock)
        self._addresses.append(address)

    def _locate(self, frame: Frame) -> None:
        """Answer where other processes of this node find the array of a variable."""
        address = dumps(self._addresses[frame.variable], "an address")
        self._answer(self._channel.send(frame.source, REPLY, Op.DONE, address))

    def _read(self, frame: Frame) -> None:
        array = self._variables[frame.variable].value
        rows = array[frame.first : frame.second] if array.ndim else array
        self._answer(self._channel.send_bare(rows, frame.source, REPLY), frame.variable)

    def _read_newer(self, frame: Frame) -> None:
        """Answer the version of a variable, and its array if the one that the reader has is older than it may be."""
        version = self._locks[frame.variable].version
        is_old = frame.first < 0 or version - frame.first > frame.second
        rows = [self._variables[frame.variable].value] if is_old else []
        sends = self._channel.send(frame.source, REPLY, Op.DONE, *rows, first=version, second=int(is_old))
        self._answer(sends, frame.variable)

    def _read_rows(self, frame: Frame) -> None:
        """Answer rows of one or more variables; the payload is the numbers of these, how many rows of each, and which."""
        asked = np.frombuffer(self._channel.payload(frame, REQUEST), np.int64)
        numbers, counts = asked[: 2 * frame.first].reshape(2, -1).tolist()
        found, start = [], 2 * frame.first
        for number, count in zip(numbers, counts, strict=True):
            found.append(self._variables[number].value.take(asked[start : start + count], axis=0))
            start += count
        rows = found[0] if len(found) == 1 else np.concatenate(found)
        self._answer(self._channel.send_bare(rows, frame.source, REPLY))

    def _write(self, frame: Frame) -> None:
        self._finish_sends(frame.variable)
        array = self._variables[frame.variable].value
        target = array[frame.first : frame.second] if array.ndim else array
        if frame.op == Op.ASSIGN and not self._channel.survives:
            with self._locks[frame.variable]:
                self._channel.receive_payload(frame, REQUEST, target)
        else:
            value = self._received(frame, target)
            with self._locks[frame.variable]:
                if frame.op == Op.ASSIGN:
                    target[...] = value
                else:
                    (np.add if frame.op == Op.ASSIGN_ADD else np.subtract)(target, value, out=target)
        self._shared.done[frame.source] += 1

    def _scatter(self, frame: Frame) -> None:
        self._finish_sends(frame.variable)
        array = self._variables[frame.variable].value
        indices, rows = np.empty(frame.first, np.int64), np.empty((frame.first, *array.shape[1:]), array.dtype)
        self._channel.receive_payload(frame, REQUEST, indices, rows)
        with self._locks[frame.variable]:
            apply(SCATTER_METHODS[frame.method], array, (rows, indices))
        self._shared.done[frame.source] += 1

    def _update(self, frame: Frame) -> None:
        """Call a function with a variable, and answer what it returns, or its error."""
        data = self._channel.payload(frame, REQUEST)
        self._finish_sends(frame.variable)
        variable, op = self._variables[frame.variable], Op.DONE
        try:
            args, kwargs, wants_result = loads(data)
            fn = self._functions[frame.source, frame.first]
            self._channel.activity.set(f"runs {getattr(fn, '__qualname__', fn)} on {variable.name}")
            with self._locks[frame.variable]:
                result = fn(variable, *args, **kwargs)
            answer = dumps(result, f"the result of an update of {variable!r}") if wants_result else b""
        except Exception as error:
            op, answer = Op.FAILED, dumps_error(error, self._channel.name)
        self._channel.activity.set(_IDLE)
        self._answer(self._channel.send(frame.source, REPLY, op, answer))

    def _flush(self, frame: Frame) -> None:
        """Answer that everything this rank has asked for before is done."""
        self._answer(self._channel.send_bare(b"\0", frame.source, REPLY))

    def _define(self, frame: Frame) -> None:
        self._functions[frame.source, frame.first] = _loaded(bytes(self._channel.payload(frame, REQUEST)))

    def _forget(self, frame: Frame) -> None:
        self._functions.pop((frame.source, frame.first), None)

    def _received(self, frame: Frame, like: Array) -> Array:
        """Return the payload as an array of a shape: where it is inline, without a copy."""
        if frame.inline is not None:
            return np.frombuffer(frame.inline, like.dtype).reshape(like.shape)
        value = np.empty_like(like)
        self._channel.receive_payload(frame, REQUEST, value)
        return value

    def _answer(self, requests: list[MPI.Request], variable: int = -1) -> None:
        if not self._channel.left(requests):
            return
        if len(self._sends) >= _MOST_SENDS:
            self._sends = self._left()
        self._sends.append((variable, requests))

    def _left(self) -> list[tuple[int, list[MPI.Request]]]:
        """Return the answers that are being sent."""
        return [(number, requests) for number, requests in self._sends if self._channel.left(requests)]

    def _finish_sends(self, variable: int | None) -> None:
        """Wait until nothing is being sent from the array of a variable; with None, until nothing is being sent at all."""
        if self._sends:
            waiting = [one for number, requests in self._sends if variable in (None, number) for one in requests]
            with suppress(UnavailableError):  # it takes nothing any more
                self._channel.wait(waiting, lambda: "a rank that takes what it has asked for", has_deadline=False)


def _loaded(data: bytes) -> Callable[..., Any]:
    """Return a function; one that cannot be loaded here says so when it is called."""
    try:
        fn: Callable[..., Any] = loads(data)
    except Exception as error:
        found = error

        def fn(*args: Any, **kwargs: Any) -> Any:
            raise TypeError(f"the function cannot be loaded on this rank: {type(found).__name__}: {found}") from found

    return fn
