"""Passing: buffers of a wrapped communicator that are handed to MPI as they are, with little Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic_ns
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array, is_on_device
from mpistrat.communicator.programs import Programs
from mpistrat.execution.executor import Executor
from mpistrat.execution.guard import Guard
from mpistrat.groups.group import MOST_UNCONFIRMED, weight
from mpistrat.reduction import ReduceOp
from mpistrat.watch.recorder import recorder, write_entry

if TYPE_CHECKING:
    from mpi4py import MPI

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
            is_passed = known.is_one_message and 0 < nbytes <= world.most_passed_bytes
            call = world.passing_call(op, array.dtype) if is_passed else (None, None, None)
            index = self._guard.index(known.digest, known.signature.text_after(0), known.signature.nbytes)
            # with its description, as how many calls one counts, and MPI's call if it is small
            self._programs.passed[handle, array.size, array.dtype] = known, index, weight(nbytes), *call

    def caller(self, run_known: Callable[..., list[Array] | None]) -> Callable[[Any, Any, MPI.Op], bool]:
        """Return what reduces two buffers of NumPy, if they are as in an earlier call, and returns whether it has.

        For small ones it is `run_known`, of the communicator, in one function: MPI takes no longer than a few calls of Python.
        """
        from mpi4py import MPI

        guard, present, timeline = self._guard, self._executor.hierarchy.call, self._executor.timeline
        passed, own, communicator = self._programs.passed, guard.thread.own, guard.communicator
        in_place, ndarray, may_share_memory, record = MPI.IN_PLACE, np.ndarray, np.may_share_memory, recorder()
        add_call = present.calls.append
        frame_at, places, find_line, next_slot = sys._getframe, record.places, record.find_line, record.slots.__next__
        memory, words = record.memory, record.words

        last_code: CodeType | None = None
        last_instruction = last_line = 0

        def pass_on(source: Any, target: Any, op: MPI.Op) -> bool:
            nonlocal last_code, last_instruction, last_line
            if type(target) is not ndarray:
                return False
            dtype, size = target.dtype, target.size
            found = passed.get((op.handle, size, dtype))
            flags = target.flags.num
            if found is None or flags & _WRITABLE != _WRITABLE:
                return False
            if source is target or source is None:
                source = in_place
            call, index, calls, all_reduce, native, datatype = found
            if source is not in_place:
                if type(source) is not ndarray or source.dtype is not dtype or source.size != size:
                    return False
                of_source = source.flags.num
                if of_source & _READABLE != _READABLE:
                    return False
                if not flags & of_source & _OWNED and may_share_memory(source, target):
                    return False
            if all_reduce is None:
                result = target if target.ndim == 1 else target.reshape(-1)
                given = result if source is in_place else source if source.ndim == 1 else source.reshape(-1)
                return run_known(call, [given], [result], 0, 3) is not None
            given = source if source is in_place else (source, size, datatype)
            digest = call.digest
            if guard.noted or guard.refusal or timeline.enabled:
                return False
            free = own.free
            try:
                free.pop()  # as `CallingThread.lock`
            except IndexError:
                return False
            slot = 0
            try:
                guard.number = number = guard.number + 1
                guard.signature, present.digest = call.signature, digest
                try:
                    frame = frame_at(2)
                except ValueError:  # the call itself is an exit handler, with no frame of Python beneath
                    frame = frame_at()
                code, instruction = frame.f_code, frame.f_lasti
                if code is not last_code or instruction != last_instruction:
                    last_line = places.get((id(code), instruction)) or find_line(frame)
                    last_code, last_instruction = code, instruction
                start, slot = next_slot()
                write_entry(memory, start, number, communicator, index, last_line, monotonic_ns())
                unconfirmed = present.unconfirmed + calls
                if calls < unconfirmed < MOST_UNCONFIRMED:  # nothing is compared
                    present.unconfirmed = unconfirmed
                    all_reduce(given, (target, size, datatype), native)
                    add_call(digest)
                else:
                    present.count()
                    all_reduce(given, (target, size, datatype), native)
                    present.add_unconfirmed(target.nbytes)
                words[slot] = monotonic_ns()
            except BaseException as error:
                if slot:
                    record.fail(slot)
                raise guard.fail_current(error) from None
            finally:
                free.append(None)
            return True

        return pass_on
