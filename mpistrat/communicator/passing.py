"""Passing: buffers of a wrapped communicator that are handed to MPI as they are, with little Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic_ns
from types import CodeType
from typing import Any

import numpy as np

from mpistrat.arrays import Array, is_on_device
from mpistrat.communicator.programs import Programs
from mpistrat.execution.executor import Executor
from mpistrat.execution.guard import Guard
from mpistrat.groups.group import MOST_UNCONFIRMED, weight
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp
from mpistrat.transports.mpi import mpi_datatype, mpi_op
from mpistrat.watch.recorder import recorder, write_entry

# of flags.num: C_CONTIGUOUS and ALIGNED; WRITEABLE too; OWNDATA
_READABLE, _WRITABLE, _OWNED = 0x0101, 0x0501, 0x0004


class Passing:
    """The calls of a wrapped communicator that are known by the handle of MPI's operation, and size and dtype of a buffer."""

    def __init__(self, programs: Programs, executor: Executor, guard: Guard) -> None:
        self._programs, self._executor, self._guard = programs, executor, guard

    def add(self, handle: int, op: ReduceOp, array: Array) -> None:
        """Have calls with such an array passed, if it is known, by the handle of MPI's operation."""
        known, world, nbytes = self._programs.known(op._value_, [array], None, None), self._executor.world, array.nbytes
        if known is not None and not is_on_device(array):
            mpi_call: tuple[Any, ...] = (None, None, None)
            if known.is_one_message and 0 < nbytes <= world.most_passed_bytes:
                mpi_call = world.group.comm.Allreduce, mpi_op(op, array.dtype), mpi_datatype(array.dtype)
            # with its description, as how many calls one counts, and MPI's call if it is small
            found = known, known.signature, known.digest, weight(nbytes), *mpi_call
            self._programs.passed[handle, array.size, array.dtype] = found

    def caller(
        self,
        run_known: Callable[..., list[Array] | None],
        unwrapped: Callable[[Any], Any],
        otherwise: Callable[[Any, Any, MPI.Op], None],
    ) -> Callable[..., None]:
        """Return what reduces two buffers of NumPy, `unwrapped`, if they are as in an earlier call; else it calls `otherwise`.

        For small ones it is `run_known`, of the communicator, in one function: MPI takes no longer than a few calls of Python.
        """
        guard, present, timeline = self._guard, self._executor.hierarchy.call, self._executor.timeline
        programs, own, communicator = self._programs, guard.thread.own, guard.communicator
        in_place, ndarray, may_share_memory, record = MPI.IN_PLACE, np.ndarray, np.may_share_memory, recorder()
        add_call = present.calls.append
        frame_at, places, find_line, next_slot = sys._getframe, record.places, record.find_line, record.slots.__next__
        memory, words = record.memory, record.words

        # of the last call that was MPI's, and what was found for it: most are like the one before; set at once, for all threads
        last: tuple[Any, ...] = (None,) * 5
        last_code: CodeType | None = None
        last_instruction = last_line = 0

        def all_reduce(sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
            nonlocal last, last_code, last_instruction, last_line
            if type(recvbuf) is not ndarray and type(recvbuf := unwrapped(recvbuf)) is not ndarray:
                return otherwise(sendbuf, recvbuf, op)
            dtype, size, flags = recvbuf.dtype, recvbuf.size, recvbuf.flags.num
            last_op, last_dtype, last_size, last_outdated, found = last
            if not (op is last_op and dtype is last_dtype and size == last_size and record.outdated is last_outdated):
                handle = getattr(op, "handle", 0)  # `otherwise` refuses what is no operation
                outdated, entry = record.outdated, programs.passed.get((handle, size, dtype))
                if entry is None:
                    return otherwise(sendbuf, recvbuf, op)
                found, last_code = (*entry, guard.index(entry[2], entry[1].text, entry[1].nbytes)), None
                if found[4] is not None:  # others have memory, which is not to be kept
                    last = op, dtype, size, outdated, found
            if flags & _WRITABLE != _WRITABLE:
                return otherwise(sendbuf, recvbuf, op)
            known, signature, digest, calls, mpi_call, native, datatype, index = found
            given: Any
            if type(sendbuf) is not ndarray and sendbuf is not in_place:
                sendbuf = unwrapped(sendbuf)
            if sendbuf is in_place or sendbuf is recvbuf or sendbuf is None:
                given = in_place
            else:
                if type(sendbuf) is not ndarray or sendbuf.dtype is not dtype or sendbuf.size != size:
                    return otherwise(sendbuf, recvbuf, op)
                of_source = sendbuf.flags.num
                overlap = not flags & of_source & _OWNED and may_share_memory(sendbuf, recvbuf)
                if overlap or of_source & _READABLE != _READABLE:
                    return otherwise(sendbuf, recvbuf, op)
                given = sendbuf, size, datatype
            if mpi_call is None:
                target = recvbuf.reshape(-1)
                if run_known(known, [target if given is in_place else sendbuf.reshape(-1)], [target], 0, 2) is None:
                    otherwise(sendbuf, recvbuf, op)
                return None
            if guard.noted or guard.refusal or timeline.enabled:
                return otherwise(sendbuf, recvbuf, op)
            free = own.free
            try:
                free.pop()  # as `CallingThread.lock`
            except IndexError:
                return otherwise(sendbuf, recvbuf, op)
            slot = 0
            try:
                guard.number = number = guard.number + 1
                try:
                    frame = frame_at(1)
                except ValueError:  # the call itself is an exit handler, with no frame of Python beneath
                    frame = frame_at()
                code, instruction = frame.f_code, frame.f_lasti
                if code is not last_code or instruction != last_instruction:
                    line = places.get((id(code), instruction))  # 0 in a frame of this library, of a subclass that calls this
                    last_code, last_instruction, last_line = code if line else None, instruction, line or find_line(frame)
                start, slot = next_slot()
                write_entry(memory, start, number, communicator, index, last_line, monotonic_ns())
                unconfirmed = present.unconfirmed + calls
                if calls < unconfirmed < MOST_UNCONFIRMED:  # nothing is compared
                    present.unconfirmed = unconfirmed
                    mpi_call(given, (recvbuf, size, datatype), native)
                    add_call(digest)
                else:
                    guard.signature, present.digest = signature, digest
                    present.count()
                    mpi_call(given, (recvbuf, size, datatype), native)
                    present.add_unconfirmed(recvbuf.nbytes)
                words[slot] = monotonic_ns()
            except BaseException as error:
                guard.signature, present.digest = signature, digest
                if slot:
                    record.fail(slot)
                raise guard.fail_current(error) from None
            finally:
                free.append(None)

        return all_reduce
