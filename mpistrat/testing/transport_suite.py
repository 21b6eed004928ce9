"""The conformance kit of transports: checks every rule of the interface against a transport.

    check_transport(MyTransport, group)     # on every rank of the group

A new transport is done when this passes, on groups of one rank and of several. No test framework is needed.

The values that it combines give the same result in every order of summation: integers of any size, which wrap around, and small
whole numbers as floats.

Invariant: ranks agree on the outcome of each rule before any of them leaves it, so that a violated rule is an AssertionError on
all ranks and no rank hangs in a collective.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import reduce
from itertools import cycle, product
from operator import itemgetter
from typing import Any
from zlib import crc32

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import DeadlineExceededError, TransportError, UnsupportedDtypeError
from mpistrat.groups.agreement import CallsDifferError, digest_of
from mpistrat.groups.group import Group
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp, check_dtype, combine, quiet
from mpistrat.settings import MAX_MESSAGE_BYTES, Snapshot
from mpistrat.steps import WORKED, Steps, drive
from mpistrat.transports.base import Operation, Transport

__all__ = ["check_transport"]

DTYPES: tuple[np.dtype[Any], ...] = tuple(np.dtype(code) for code in "?bBhHiIqQfdFD")
VERBS = ("all_reduce", "reduce_scatter", "all_gather")
COUNTS = (0, 1, 3)
COUNT = 67  # a prime, so not a multiple of the number of ranks
LARGE_COUNT = 80_001  # of 4 bytes: several segments and cache blocks
SLOT_BYTES = 4 * LARGE_COUNT + 4092
NUM_SLOTS = 2
SMALL_MESSAGE_BYTES = 40
SLOW_SECONDS, BLOCKED_SECONDS, STUCK_SECONDS = 0.005, 5.0, 30.0
POLLS = 100
_GUARD_BYTES, _GUARD = 64, 0x5A

INT32, COMPLEX128 = np.dtype(np.int32), np.dtype(np.complex128)
FLOATS: tuple[np.dtype[Any], ...] = (np.dtype(np.float32), np.dtype(np.float64))


def check_transport(make: Callable[[Group], Transport], group: Group, between_nodes: bool = False) -> int:
    """Run every rule of `transports.base.Transport` against a transport. A collective call.

    Parameters
    ----------
    make : callable
        Makes the transport of a group: a class, for example.
    group : Group
        The ranks to join. More ranks test more; a group of one rank should be checked too.
    between_nodes : bool
        Whether it is to be used between nodes, where the result of an all-reduce must be in the buffer itself.

    Returns
    -------
    int
        The number of comparisons made.

    Raises
    ------
    AssertionError
        On every rank, if a rule is violated on any, or anything raises; names the transport, verb, dtype, count and rank.
    """
    in_place = ("all_reduce", "reduce_scatter") if between_nodes else ("reduce_scatter",)
    of_small_messages = copy(group)
    of_small_messages.settings = Snapshot({**os.environ, MAX_MESSAGE_BYTES.name: str(SMALL_MESSAGE_BYTES)})
    of_small_messages.comm = _measuring(group.comm)
    both = (_RULES, group), (_RULES_OF_SMALL_MESSAGES, of_small_messages)
    return sum(_check(rules, Subject(make, each, in_place)) for rules, each in both)


def _check(rules: Sequence[Callable[[Subject], None]], subject: Subject) -> int:
    try:
        for rule in rules:
            subject.hold(rule)
    finally:
        subject.hold(_it_is_disposed)
        subject.comm.Free()
    return subject.checks


class Subject:
    """One transport on one group, and what is wrong with it. Making one is a collective call.

    The verbs `in_place` leave their results in the buffer itself.
    """

    transport: Transport
    arena: Array

    def __init__(self, make: Callable[[Group], Transport], group: Group, in_place: Collection[str]) -> None:
        self.make, self.group, self.rank, self.size = make, group, group.rank, group.size
        self.name, self.comm, self.in_place = "transport", group.comm.Dup(), in_place
        self.checks = self.seed = 0
        self.what: object = "a call"
        self._rule = ""
        self._problems: list[tuple[bool, str]] = []  # whether it has waited in vain, perhaps for a rank with another problem
        self.hold(_it_is_made)

    def hold(self, rule: Callable[[Subject], None]) -> None:
        """Run a rule, and raise on all ranks if it, or one before it, does not hold on one."""
        self._rule, self.what = rule.__name__.strip("_"), "a call"
        try:
            rule(self)
        except Exception as error:
            self.fail(self.what, traceback.format_exc(), isinstance(error, DeadlineExceededError))
        found = [problems[0] for problems in self.comm.allgather(self._problems) if problems]
        if found:
            raise AssertionError(min(found, key=itemgetter(0))[1])

    def fail(self, what: object, problem: str, has_waited: bool = False) -> None:
        """Record a failure; the rule goes on, in step with the other ranks."""
        where = f"rank {self.rank} of {self.size} ({self.group.name})"
        self._problems.append((has_waited, f"rule {self._rule!r}: {self.name}: {what} on {where}: {problem}"))

    def expect(self, what: object, found: Array, expected: Array) -> None:
        """Compare two arrays; NaN equals NaN, and bools are compared as bytes."""
        self.checks += 1
        one, other = (array.view(np.uint8) if array.dtype.kind == "b" else array for array in (found, expected))
        wrong = (one != other) & ~((one != one) & (other != other))
        if wrong.any():
            index = int(np.argmax(wrong))
            text = f"element {index} is {found[index]}, expected {expected[index]}; {wrong.sum()} of {wrong.size} are wrong"
            self.fail(what, text)

    def allocate(self, nbytes: int) -> None:
        self.arena = self.transport.allocate(nbytes)
        shape, dtype = self.arena.shape, self.arena.dtype.name
        writable = self.transport.device is not None or self.arena.flags.writeable
        if (shape, dtype, writable) != ((nbytes,), "uint8", True):
            self.fail("allocate", f"returned {dtype} {shape}, writable={writable}; expected writable uint8 ({nbytes},)")

    def serves(self, dtype: np.dtype[Any], op: ReduceOp) -> bool:
        """Return whether the transport combines such values; if it does not, binding a verb must raise."""
        refusal = self.transport.refusal(dtype, op)
        if refusal:
            try:
                self.transport.all_reduce(self.arena[: dtype.itemsize].view(dtype), op)
            except TransportError:
                self.checks += 1
            else:
                self.fail(f"all_reduce({dtype}, {op.name})", f"was bound although it is refused: {refusal}")
        return not refusal

    def put(self, target: Array, values: Array) -> None:
        if self.transport.device:
            self.transport.device.put(target, values)
        else:
            target[...] = values

    def get(self, source: Array) -> Array:
        return self.transport.device.get(source) if self.transport.device else source

    def drive(self, steps: Steps, what: object) -> None:
        quiet()(drive, steps, lambda: f"{self.name}: {what}", STUCK_SECONDS)

    def settle(self) -> None:
        """Wait until all ranks have read their results."""
        self.fence(self.transport.release())

    def fence(self, number: int) -> None:
        """Wait until the memory can be written again."""
        self.drive(self.transport.fence(number), "fence")

    def even(self, verb: str, count: int, dtype: np.dtype[Any] = INT32) -> Case:
        """Return a sum whose parts are even."""
        return Case(verb, dtype, ReduceOp.SUM, count, divisions(count, self.size)[0])

    def attempt(self, case: Case, *values: Array | None) -> None:
        """Bind a case once, and run it on each of some values, by default once on new ones, as None means."""
        trial = Trial(self, case)
        for given in values or [None]:
            trial.run(given)
            trial.compare()
            self.settle()


class Trial:
    """A case, bound once to a buffer between guards in a slot of the memory; `given` has its values, a row for each rank."""

    given: Array

    def __init__(self, subject: Subject, case: Case, slot: int = 0, channel: int = 0) -> None:
        self.subject, self.case, subject.what = subject, case, case
        nbytes = case.count * case.dtype.itemsize
        memory = subject.arena[slot * SLOT_BYTES :][: nbytes + 2 * _GUARD_BYTES]
        self._guards = memory[:_GUARD_BYTES], memory[_GUARD_BYTES + nbytes :]
        for guard in self._guards:
            subject.put(guard, np.full(guard.size, _GUARD, np.uint8))
        self.buffer: Array = memory[_GUARD_BYTES : _GUARD_BYTES + nbytes].view(case.dtype)
        self.operation = case.bind(subject.transport, self.buffer, channel)

    def write(self, given: Array | None = None) -> None:
        """Write this rank's input, of given or new values; the rest of the buffer is poisoned."""
        case, subject = self.case, self.subject
        if given is None:
            subject.seed += 1
            given = inputs(case.dtype, case.op, case.count, subject.size, subject.seed)
        self.given, values, mine = given, case.poisoned(), case.given(subject.rank)
        values[mine] = given[subject.rank, mine]
        subject.put(self.buffer, values)

    def run(self, given: Array | None = None) -> None:
        """Write this rank's input, and run the operation to the end."""
        self.write(given)
        self.subject.drive(self.operation.run(), self.case)

    def compare(self) -> None:
        """Compare what this rank can read with what it was promised."""
        case, subject = self.case, self.subject
        promised = case.promised(subject.rank)
        expected = case.expected(self.given)[promised]
        subject.expect(case, self.read(), expected)
        if case.verb in subject.in_place:
            subject.expect(f"{case}, in the buffer itself,", subject.get(self.buffer[promised]), expected)
        if any((subject.get(guard) != _GUARD).any() for guard in self._guards):
            subject.fail(case, "memory outside the buffer was written")

    def read(self) -> Array:
        """Return the promised elements, combined from the operation's parts; elements that no part covers stay poisoned."""
        result, covered = self.case.poisoned(), np.zeros(self.case.count, np.int8)
        for part in self.operation.parts:
            result[part.start : part.stop] = reduce(combine(self.case.op), map(self.subject.get, part.addends))
            covered[part.start : part.stop] += 1
        promised = self.case.promised(self.subject.rank)
        if (covered[promised] != 1).any():
            self.subject.fail(self.case, "the parts do not cover each promised element once")
        return result[promised]


def _it_is_made(subject: Subject) -> None:
    subject.transport = subject.make(subject.group)
    subject.name = subject.transport.name


def _it_is_disposed(subject: Subject) -> None:
    subject.transport.dispose()


def _the_group_is_served(subject: Subject) -> None:
    reason: Any = type(subject.transport).probe(subject.group)
    if reason != "":
        subject.fail("probe", f"returned {reason!r}; an empty text was expected")
    subject.allocate(NUM_SLOTS * SLOT_BYTES)


def _every_dtype_and_operation(subject: Subject) -> None:
    bounds = cycle(divisions(COUNT, subject.size))
    for dtype in DTYPES:
        for op in operations(dtype):
            for verb in ("all_reduce", "reduce_scatter") if subject.serves(dtype, op) else ():
                subject.attempt(Case(verb, dtype, op, COUNT, next(bounds)))
        subject.attempt(Case("all_gather", dtype, ReduceOp.SUM, COUNT, next(bounds)))


def _every_size_and_division(subject: Subject) -> None:
    for count in COUNTS:
        for case in cases(INT32, ReduceOp.SUM, count, subject.size):
            subject.attempt(case)
    for case in cases(INT32, ReduceOp.SUM, COUNT, subject.size):
        subject.attempt(case, None, None)
    for verb, bounds in product(VERBS, divisions(LARGE_COUNT, subject.size)[::3]):
        subject.attempt(Case(verb, INT32, ReduceOp.SUM, LARGE_COUNT, bounds))


def _messages_may_be_small(subject: Subject) -> None:
    comm: Any = subject.group.comm  # of `_measuring`
    op = ReduceOp.PROD if subject.serves(COMPLEX128, ReduceOp.PROD) else ReduceOp.SUM
    for case in cases(COMPLEX128, op, COUNT, subject.size):
        subject.attempt(case)
        if comm.longest > SMALL_MESSAGE_BYTES:
            subject.fail(case, f"a message has {comm.longest} bytes, and {MAX_MESSAGE_BYTES.name} is {SMALL_MESSAGE_BYTES}")


def _nan_wins(subject: Subject) -> None:
    count = subject.size + 1  # element r is NaN on rank r, the last one is NaN nowhere
    verbs, ops = ("all_reduce", "reduce_scatter"), (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM)
    for verb, op, dtype in product(verbs, ops, FLOATS):
        if subject.serves(dtype, op):
            given = inputs(dtype, op, count, subject.size, seed=count)
            given[range(subject.size), range(subject.size)] = np.nan
            subject.attempt(Case(verb, dtype, op, count, divisions(count, subject.size)[0]), given)


def _all_ranks_get_equal_bits(subject: Subject) -> None:
    for dtype, count in product((*FLOATS, np.dtype(np.complex64)), (1, 5000)):
        trial = Trial(subject, subject.even("all_reduce", count, dtype))
        given = np.random.default_rng(count).normal(size=(subject.size, count)).astype(dtype)
        trial.run(given)
        found = trial.read()
        subject.settle()
        subject.checks += 1
        if len(set(subject.comm.allgather(crc32(found.tobytes())))) > 1:
            subject.fail(trial.case, "ranks got different bits")
        bound = subject.size * np.finfo(dtype).eps * np.abs(given).sum(axis=0)
        if not (np.abs(found - given.sum(axis=0, dtype=np.complex128)) <= bound).all():
            subject.fail(trial.case, "the error is larger than that of summing in any order")


def _verbs_follow_each_other(subject: Subject) -> None:
    """Combine, change the result of this rank, and distribute it, as a plan does."""
    for bounds in divisions(COUNT, subject.size):
        verbs = ("reduce_scatter", "all_gather")
        combining, distributing = (Trial(subject, Case(verb, INT32, ReduceOp.SUM, COUNT, bounds)) for verb in verbs)
        combining.run()
        mine = combining.buffer[combining.case.promised(subject.rank)]
        subject.put(mine, subject.get(mine) * 3)
        subject.drive(distributing.operation.run(), distributing.case)
        subject.expect(distributing.case, distributing.read(), 3 * combining.case.expected(combining.given))
        subject.settle()


def _slots_alternate(subject: Subject) -> None:
    """Fill a slot again while a slow rank still reads the other one."""
    for verb in ("all_reduce", "all_gather", "reduce_scatter"):
        trials = [Trial(subject, subject.even(verb, COUNT), slot) for slot in range(NUM_SLOTS)]
        releases: list[int] = []
        for step in range(3 * NUM_SLOTS):
            trial = trials[step % NUM_SLOTS]
            if step >= NUM_SLOTS:
                subject.fence(releases[step - NUM_SLOTS])
            trial.run()
            if subject.rank == step % subject.size:
                time.sleep(SLOW_SECONDS / 2)
            trial.compare()
            releases.append(subject.transport.release())
        subject.settle()


def _channels_are_apart(subject: Subject) -> None:
    """Advance two operations on two channels, on each rank in another order; begin them so only if it `has_channels`."""
    case = subject.even("all_reduce", 30 * subject.size)  # messages of equal size, of which MPI would not notice a wrong match
    trials = [Trial(subject, case, slot, channel=slot) for slot in range(NUM_SLOTS)]
    for trial in trials:
        trial.write()
    running = [trial.operation.run() for trial in trials]
    subject.drive(_interleaved(running, subject.rank, subject.transport.has_channels), case)
    for trial in trials:
        trial.compare()
    subject.settle()


def _a_slow_rank_reads_the_old_values(subject: Subject) -> None:
    for verb, slow in product(VERBS, sorted({0, subject.size - 1})):
        trial = Trial(subject, subject.even(verb, 1000))
        trial.write()
        steps = trial.operation.run()
        subject.drive(_slowed(steps) if subject.rank == slow else steps, trial.case)
        if subject.rank == slow:
            time.sleep(SLOW_SECONDS)
        trial.compare()
        subject.settle()
        subject.put(trial.buffer, trial.case.poisoned())


def _run_does_not_block(subject: Subject) -> None:
    """Delay one rank: before it enters, no other rank blocks, and none that needs its values completes."""
    late = 1
    for case in cases(INT32, ReduceOp.SUM, COUNT, subject.size) if subject.size > 1 else ():
        trial = Trial(subject, case)
        trial.write()
        steps: Steps = iter(())
        ended = False
        if subject.rank != late:
            steps = trial.operation.run()
            ended = any(next(steps, None) is None for _ in range(POLLS))
        others = subject.comm.Ibarrier()
        deadline = time.monotonic() + BLOCKED_SECONDS
        while not (arrived := others.Test()) and time.monotonic() < deadline:
            os.sched_yield()
        subject.drive(trial.operation.run() if subject.rank == late else steps, case)
        others.Wait()
        if not all(subject.comm.allgather(arrived)):
            subject.fail(case, f"run() blocked until rank {late} had entered it")
        elif ended and all(part.stop > part.start for part in (case.promised(subject.rank), case.given(late))):
            subject.fail(case, f"ended although rank {late} had not entered it")
        trial.compare()
        subject.settle()


def _calls_are_told_apart(subject: Subject) -> None:
    """Run a verb in another call on each rank: over a transport that compares calls it does not end, and moves nothing."""
    if not subject.transport.compares_calls or subject.size == 1:
        return
    for verb in VERBS:
        trial = Trial(subject, subject.even(verb, COUNT))
        trial.write()
        before = subject.get(trial.buffer).copy()
        subject.group.call.digest = digest_of(f"{trial.case} of rank {subject.rank}")  # after it was bound
        steps = trial.operation.run()
        has_ended = _ends_in_another_call(steps, subject)
        if isinstance(steps, Generator):
            steps.close()
        subject.group.call.digest = 0
        subject.checks += 1
        if has_ended or (subject.get(trial.buffer) != before).any():
            subject.fail(trial.case, "compares_calls is set, but ranks in different calls got values of each other")


def _memory_is_given_back_and_taken_again(subject: Subject) -> None:
    subject.transport.close()
    subject.allocate(NUM_SLOTS * SLOT_BYTES + 4096)
    for case in cases(INT32, ReduceOp.SUM, COUNT, subject.size):
        subject.attempt(case)


_RULES = (
    _the_group_is_served,
    _every_dtype_and_operation,
    _every_size_and_division,
    _nan_wins,
    _all_ranks_get_equal_bits,
    _verbs_follow_each_other,
    _slots_alternate,
    _channels_are_apart,
    _a_slow_rank_reads_the_old_values,
    _run_does_not_block,
    _memory_is_given_back_and_taken_again,
    _calls_are_told_apart,  # the last one: it leaves messages that nobody receives
)
_RULES_OF_SMALL_MESSAGES = (_the_group_is_served, _messages_may_be_small, _channels_are_apart)


def _interleaved(running: list[Steps], seed: int, begin_at_random: bool) -> Steps:
    """Begin with the first step of each, in order unless told otherwise, and go on at random."""
    random = np.random.default_rng(seed)
    order = [] if begin_at_random else list(range(len(running)))
    while running:
        index = order.pop(0) if order else int(random.integers(len(running)))
        worked = next(running[index], None)
        if worked is None:
            del running[index]
            order.clear()
        else:
            yield worked


def _ends_in_another_call(steps: Steps, subject: Subject) -> bool:
    """Return whether an operation ends, other than by the notice that calls differ, when all ranks have begun theirs."""
    has_ended = is_told = False
    for _ in range(2):
        try:
            has_ended = not is_told and any(next(steps, None) is None for _ in range(POLLS))
        except CallsDifferError:
            is_told = True
        subject.comm.Barrier()
    return has_ended


def _measuring(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator whose class notes the bytes of the longest message that MPI gets on it, or on a duplicate."""

    class Measuring(MPI.Intracomm):
        longest = 0

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if not name[0].isupper():  # methods in lower case send pickled objects
                return found

            def call(*arguments: Any, **named: Any) -> Any:
                Measuring.longest = max([Measuring.longest, *map(_message_bytes, (*arguments, *named.values()))])
                return found(*arguments, **named)

            return call

    return Measuring(comm)


def _message_bytes(argument: Any) -> int:
    """Return the bytes of an argument of MPI's: a buffer, alone or in a list with counts and datatype; 0 of anything else."""
    match argument:
        case [buffer, None | str() | MPI.Datatype(), *_]:  # all of the buffer
            return _message_bytes(buffer)
        case [_, counts, *_, MPI.Datatype() as datatype]:  # a tuple has displacements too
            return int(np.sum(counts[0] if isinstance(counts, tuple) else counts)) * int(datatype.size)
    return int(getattr(argument, "nbytes", 0))


def _slowed(steps: Steps) -> Steps:
    for worked in steps:
        yield worked
        if worked is WORKED:
            time.sleep(SLOW_SECONDS)


@dataclass(frozen=True)
class Case:
    """One verb on a buffer of `count` elements, of which ``bounds[r]:bounds[r + 1]`` are rank r's part."""

    verb: str
    dtype: np.dtype[Any]
    op: ReduceOp
    count: int
    bounds: Sequence[int]

    def bind(self, transport: Transport, buffer: Array, channel: int = 0) -> Operation:
        """Bind the verb to a buffer of a transport."""
        of_verb = {"all_reduce": (self.op, channel), "reduce_scatter": (self.bounds, self.op), "all_gather": (self.bounds,)}
        operation: Operation = getattr(transport, self.verb)(buffer, *of_verb[self.verb])
        return operation

    def given(self, rank: int) -> slice:
        """Return the elements that `rank` contributes; the rest of its buffer is poisoned."""
        return self._part(rank) if self.verb == "all_gather" else slice(0, self.count)

    def promised(self, rank: int) -> slice:
        """Return the elements that `rank` may read afterwards."""
        return self._part(rank) if self.verb == "reduce_scatter" else slice(0, self.count)

    def expected(self, given: Array) -> Array:
        """Return the whole result; row r of `given` is the input of rank r."""
        if self.verb == "all_gather":
            return np.concatenate([row[self._part(rank)] for rank, row in enumerate(given)])
        total: Array = combine(self.op).reduce(given, axis=0, dtype=given.dtype)
        return total

    def poisoned(self) -> Array:
        """Return an array of its length with values that no result has: NaN, or a byte pattern that no test value has."""
        if self.dtype.kind in "fc":
            return np.full(self.count, np.nan, self.dtype)
        return np.full(self.count * self.dtype.itemsize, 0xA5, np.uint8).view(self.dtype)

    def _part(self, rank: int) -> slice:
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def __str__(self) -> str:
        bounds = "" if self.verb == "all_reduce" else f", bounds {list(self.bounds)}"
        return f"{self.verb}({self.count} x {self.dtype}, {self.op.name}{bounds})"


def operations(dtype: np.dtype[Any]) -> list[ReduceOp]:
    """Return the operations that are defined for a dtype."""
    defined = []
    for op in ReduceOp:
        try:
            check_dtype(op, dtype)
        except UnsupportedDtypeError:
            continue
        defined.append(op)
    return defined


def divisions(count: int, size: int) -> list[list[int]]:
    """Return bounds of all kinds: even, rising, all for the first rank, all for the last."""
    even = [rank * count // size for rank in range(size + 1)]
    rising = [count * rank * (rank + 1) // (size * (size + 1)) for rank in range(size + 1)]
    return [even, rising, [0, *[count] * size], [*[0] * size, count]]


def cases(dtype: np.dtype[Any], op: ReduceOp, count: int, size: int) -> Iterator[Case]:
    """Return each verb with every division."""
    even = divisions(count, size)[0]
    yield Case("all_reduce", dtype, op, count, even)
    for verb, bounds in product(("reduce_scatter", "all_gather"), divisions(count, size)):
        yield Case(verb, dtype, op, count, bounds)


def inputs(dtype: np.dtype[Any], op: ReduceOp, count: int, size: int, seed: int) -> Array:
    """Return one row of values per rank, the same on all ranks."""
    random = np.random.default_rng(seed)
    shape = (size, count)
    if dtype.kind == "b":
        # so that both results occur, even with many ranks
        rare = random.random(shape) < 1 / (size + 1)
        return rare if op in (ReduceOp.SUM, ReduceOp.MAX) else ~rare
    if dtype.kind in "iu":
        return np.frombuffer(random.bytes(size * count * dtype.itemsize), dtype).reshape(shape)
    if op is ReduceOp.PROD:
        factors = [1, -1, 2, 0.5] if dtype.kind == "f" else [1, 1j, -1, 1 + 1j]
        return np.array(factors, dtype)[random.integers(0, 4, shape)]
    values = random.integers(-9, 10, shape).astype(dtype)
    return values if dtype.kind == "f" else values + np.array(1j, dtype) * random.integers(-9, 10, shape).astype(dtype)
