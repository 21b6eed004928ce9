"""A transport under test: its memory, running a case on it, and the failures found.

Invariant: ranks agree on the outcome of each rule before any of them leaves it, so that a violated rule is an AssertionError on
all ranks and no rank hangs in a collective.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import TransportError
from mpistrat.groups.group import Group
from mpistrat.reduction import ReduceOp, combine
from mpistrat.steps import Steps, drive
from mpistrat.testing.transport_cases import Case, inputs, poison
from mpistrat.transports.base import Operation, Transport

LARGE_COUNT = 80_001  # of 4 bytes: several segments and cache blocks
SLOT_BYTES = 4 * LARGE_COUNT + 4092
NUM_SLOTS = 2
STUCK_SECONDS = 30.0

_GUARD_BYTES = 64
_GUARD = 0x5A


class Subject:
    """One transport on one group. Making one is a collective call.

    The verbs `in_place` leave their results in the buffer itself.
    """

    def __init__(self, make: Callable[[Group], Transport], group: Group, in_place: Collection[str]) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self.comm = group.comm.Dup()
        self.transport = make(group)
        self.in_place = in_place
        self.checks = 0
        self._arena: Array = np.empty(0, np.uint8)
        self._seed = 0
        self._problems: list[str] = []

    def hold(self, rule: Callable[[Subject], None]) -> None:
        """Run a rule, and raise on all ranks if it does not hold on one."""
        try:
            rule(self)
        except Exception:
            self._problems.append(traceback.format_exc())
        first = [problems[0] for problems in self.comm.allgather(self._problems) if problems]
        if first:
            raise AssertionError(f"rule {rule.__name__.strip('_')!r}: {first[0]}")

    def allocate(self, nbytes: int) -> None:
        """Allocate memory from the transport."""
        self._arena = self.transport.allocate(nbytes)
        shape, dtype = self._arena.shape, self._arena.dtype.name
        writable = self.transport.device is not None or self._arena.flags.writeable
        if (shape, dtype, writable) != ((nbytes,), "uint8", True):
            self.fail("allocate", f"returned {dtype} {shape}, writable={writable}; expected writable uint8 ({nbytes},)")

    def serves(self, dtype: np.dtype[Any], op: ReduceOp) -> bool:
        """Return whether the transport combines such values; if it does not, binding a verb must raise."""
        refusal = self.transport.refusal(dtype, op)
        if refusal:
            try:
                self.transport.all_reduce(self._arena[: dtype.itemsize].view(dtype), op)
            except TransportError:
                self.checks += 1
            else:
                self.fail(f"all_reduce({dtype}, {op.name})", f"was bound although it is refused: {refusal}")
        return not refusal

    def attempt(self, case: Case, times: int = 1) -> None:
        """Bind a case once and run it, each time on new values."""
        buffer, operation = self.bind(case)
        for _ in range(times):
            given = self.values(case)
            self.run(case, buffer, operation, given)
            self.compare(case, buffer, operation, given)
            self.settle()

    def bind(self, case: Case, slot: int = 0) -> tuple[Array, Operation]:
        """Return the buffer of a case, between guards in a slot of the memory, and the operation bound to it."""
        start = slot * SLOT_BYTES + _GUARD_BYTES
        buffer = self._arena[start : start + case.count * case.dtype.itemsize].view(case.dtype)
        for guard in self._guards(buffer, slot):
            self.put(guard, np.full(guard.size, _GUARD, np.uint8))
        return buffer, case.bind(self.transport, buffer)

    def values(self, case: Case) -> Array:
        """Return new values for all ranks; row r is for rank r."""
        self._seed += 1
        return inputs(case.dtype, case.op, case.count, self.size, self._seed)

    def run(self, case: Case, buffer: Array, operation: Operation, given: Array) -> None:
        """Write this rank's input, and run the operation to the end."""
        self.give(case, buffer, given)
        self.drive(operation.run(), case)

    def give(self, case: Case, buffer: Array, given: Array) -> None:
        """Write this rank's input; the rest of the buffer is poisoned."""
        values = self.poisoned(case)
        mine = case.given(self.rank)
        values[mine] = given[self.rank, mine]
        self.put(buffer, values)

    def poisoned(self, case: Case) -> Array:
        """Return an array of the case's length with values that no result has."""
        values = np.empty(case.count, case.dtype)
        poison(values)
        return values

    def put(self, target: Array, values: Array) -> None:
        """Write to memory of the transport."""
        if self.transport.device:
            self.transport.device.put(target, values)
        else:
            target[...] = values

    def get(self, source: Array) -> Array:
        """Return the contents of memory of the transport."""
        return self.transport.device.get(source) if self.transport.device else source

    def drive(self, steps: Steps, what: object) -> None:
        """Advance steps to the end."""
        drive(steps, lambda: f"{self.transport.name}: {what}", STUCK_SECONDS)

    def settle(self) -> None:
        """Wait until all ranks have read their results."""
        self.fence(self.transport.release())

    def fence(self, number: int) -> None:
        """Wait until the memory can be written again."""
        self.drive(self.transport.fence(number), "fence")

    def compare(self, case: Case, buffer: Array, operation: Operation, given: Array, slot: int = 0) -> None:
        """Compare what this rank can read with what it was promised."""
        promised = case.promised(self.rank)
        expected = case.expected(given)[promised]
        self.expect(case, self.read(case, operation), expected)
        if case.verb in self.in_place:
            self.expect(f"{case}, in the buffer itself,", self.get(buffer[promised]), expected)
        if any((self.get(guard) != _GUARD).any() for guard in self._guards(buffer, slot)):
            self.fail(case, "memory outside the buffer was written")

    def read(self, case: Case, operation: Operation) -> Array:
        """Return the promised elements, combined from the operation's parts; elements that no part covers stay poisoned."""
        result = self.poisoned(case)
        covered = np.zeros(case.count, np.int8)
        for part in operation.parts:
            total = self.get(part.addends[0])
            for addend in part.addends[1:]:
                total = combine(case.op)(total, self.get(addend))
            result[part.start : part.stop] = total
            covered[part.start : part.stop] += 1
        promised = case.promised(self.rank)
        if (covered[promised] != 1).any():
            self.fail(case, "the parts do not cover each promised element once")
        return result[promised]

    def expect(self, what: object, found: Array, expected: Array) -> None:
        """Compare two arrays; NaN equals NaN."""
        self.checks += 1
        wrong = _differ(found, expected)
        if wrong.any():
            index = int(np.argmax(wrong))
            text = f"element {index} is {found[index]}, expected {expected[index]}; {wrong.sum()} of {wrong.size} are wrong"
            self.fail(what, text)

    def fail(self, what: object, problem: str) -> None:
        """Record a failure; the rule goes on, in step with the other ranks."""
        where = f"rank {self.rank} of {self.size} ({self.group.name})"
        self._problems.append(f"{self.transport.name}: {what} on {where}: {problem}")

    def close(self) -> None:
        """Free the transport's memory."""
        self.transport.dispose()
        self.comm.Free()

    def _guards(self, buffer: Array, slot: int) -> Iterable[Array]:
        start = slot * SLOT_BYTES
        stop = start + _GUARD_BYTES + buffer.nbytes
        return self._arena[start : start + _GUARD_BYTES], self._arena[stop : stop + _GUARD_BYTES]


def _differ(found: Array, expected: Array) -> Array:
    """Return where two arrays differ; bools are compared as bytes."""
    if found.dtype.kind == "b":
        found, expected = found.view(np.uint8), expected.view(np.uint8)
    differ: Array = (found != expected) & ~((found != found) & (expected != expected))
    return differ
