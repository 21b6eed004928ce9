"""One rank does not come at all, or its program ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from tests.disagreements.case import Case
from tests.disagreements.kinds.registry import kind

_SIZES = (10, 300_000)
_FOR_EVER = 3600.0


@kind("absent", sizes=_SIZES, allowed={"reported"}, rewarm=False)
def computes(case: Case) -> None:
    """One rank computes in Python, and never comes."""
    if case.is_odd:
        end, total = time.monotonic() + _FOR_EVER, 0
        while time.monotonic() < end:
            total += 1
    case.all_reduce("sum", case.operand())


@kind("absent", sizes=_SIZES, allowed={"reported"}, rewarm=False)
def sleeps(case: Case) -> None:
    """One rank sleeps, and never comes."""
    if case.is_odd:
        time.sleep(_FOR_EVER)
    case.all_reduce("sum", case.operand())


@kind("absent", sizes=_SIZES, allowed={"reported"}, rewarm=False)
def sleeps_before_a_gather(case: Case) -> None:
    """One rank never comes to an all_gather."""
    if case.is_odd:
        time.sleep(_FOR_EVER)
    case.all_gather(case.operand())


@kind("absent", sizes=(10,), allowed={"reported"}, rewarm=False)
def sleeps_before_a_variable(case: Case) -> None:
    """One rank never comes to the making of a variable."""
    if case.is_odd:
        time.sleep(_FOR_EVER)
    case.variable(case.operand())


@kind("absent", sizes=(10,), allowed={"reported"}, rewarm=False)
def sleeps_before_a_barrier(case: Case) -> None:
    """One rank never comes to a barrier."""
    if case.is_odd:
        time.sleep(_FOR_EVER)
    case.barrier()


@kind("absent", sizes=_SIZES, alone=True, says=r"(?i)a rank fails here")
def raises(case: Case) -> None:
    """One rank raises while the others are in a collective."""
    if case.is_odd:
        raise ValueError("a rank fails here")
    case.all_reduce("sum", case.operand())


@kind("absent", sizes=(10,), alone=True, says=r"(?i)no such file of rows")
def data_raises(case: Case) -> None:
    """One rank's source of data raises."""

    def batches() -> object:
        for number in range(6):
            if case.is_odd and number == 3:
                raise FileNotFoundError("no such file of rows")
            yield np.full(2, float(number))

    for batch in case.strategy.distribute_datasets_from_function(lambda context: batches()):
        case.run(lambda context, batch=batch: context.all_reduce("sum", batch.values[0]))


@kind("absent", sizes=_SIZES)
def interrupted(case: Case) -> None:
    """A signal handler raises on one rank that waits in a collective, which others then come to in vain."""
    if case.is_odd:
        with suppress(InterruptedError), _interrupted_after(0.3):
            case.all_reduce("sum", case.operand())
    elif case.odd is not None:
        time.sleep(1.0)
    case.all_reduce("sum", case.operand())


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@kind("absent", sizes=_SIZES, alone=True, allowed={"told", "reported"}, says=r"(?is)(rank \d+).*(end|gone|exit|left)")
def ends(case: Case) -> None:
    """One rank's program ends while the others are in a collective."""
    if case.is_odd:
        return
    case.all_reduce("sum", case.operand())


@kind("absent", sizes=(10,), alone=True, allowed={"told", "reported"}, says=r"exit:[1-9]")
def exits(case: Case) -> None:
    """One rank calls sys.exit(3) while the others are in a collective."""
    if case.is_odd:
        sys.exit(3)
    case.all_reduce("sum", case.operand())


@kind("absent", sizes=(10,), alone=True, allowed={"told", "reported"}, says=r"exit:[1-9]")
def vanishes(case: Case) -> None:
    """One rank is gone without a word."""
    if case.is_odd:
        os._exit(7)
    case.all_reduce("sum", case.operand())


@kind("order", sizes=_SIZES, alone=True)
def started_longer_and_ended(case: Case) -> None:
    """One rank starts a longer reduction, nobody waits for it, and the program ends."""
    case.kept.append(case.start("sum", case.operand(case.pick(case.count, case.count + max(1, case.count // 5)))))


@kind("order", sizes=_SIZES, alone=True)
def last_call_more(case: Case) -> None:
    """One rank makes one call more, and the program ends."""
    for _ in range(case.pick(3, 4)):
        case.all_reduce("sum", case.operand())


@kind("order", sizes=_SIZES, alone=True)
def last_call_longer(case: Case) -> None:
    """One rank's array is longer in the last call of the program."""
    case.all_reduce("sum", case.operand(case.pick(case.count, case.count + max(1, case.count // 5))))
