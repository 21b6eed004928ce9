"""Advancing steps: to the end, to a deadline, and by and by through a handle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import repeat

import pytest

from mpistrat.errors import DeadlineExceededError
from mpistrat.execution.work import Work
from mpistrat.transports.base import WAITING, WORKED, drive


def test_steps_are_driven_to_the_end() -> None:
    seen: list[int] = []

    def steps() -> Iterator[bool]:
        for index in range(1000):
            seen.append(index)
            yield WORKED if index % 3 else WAITING

    drive(steps(), lambda: "this")
    assert seen == list(range(1000))


def test_a_deadline_ends_waiting_and_names_what_was_waited_for() -> None:
    started = time.monotonic()
    message = r"all_reduce\(SUM\) did not end within 0\.02 s; not all ranks have arrived"
    with pytest.raises(DeadlineExceededError, match=message) as caught:
        drive(repeat(WAITING), lambda: "all_reduce(SUM)", 0.02)
    assert 0.02 <= time.monotonic() - started < 5
    assert isinstance(caught.value, TimeoutError)


def test_who_drives_may_say_what_is_overdue() -> None:
    overdue = DeadlineExceededError("rank 3 does not answer")
    for late in (
        lambda: drive(repeat(WAITING), lambda: "this", 0.01, lambda: overdue),
        Work(repeat(WAITING), lambda: None, lambda: "this", 0.01, lambda: overdue).wait,
    ):
        with pytest.raises(DeadlineExceededError, match="^rank 3 does not answer$"):
            late()


def test_what_is_at_work_is_not_late() -> None:
    def steps() -> Iterator[bool]:
        for _ in range(3):
            time.sleep(0.005)
            yield WORKED

    drive(steps(), lambda: "slow work", 0.001)


def test_an_error_in_a_step_comes_through() -> None:
    def steps() -> Iterator[bool]:
        yield WORKED
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        drive(steps(), lambda: "this")


def test_a_handle_advances_when_it_is_asked() -> None:
    work = Work(iter([WORKED, WAITING, WORKED]), lambda: "result", lambda: "this")
    assert [work.done() for _ in range(3)] == [False, True, True], "it stops where it would have to wait"
    assert work.wait() == work.wait() == "result"


def test_waiting_goes_to_the_end_from_anywhere() -> None:
    steps = iter([WAITING, *[WORKED] * 5])
    work = Work(steps, lambda: 7, lambda: "this")
    assert not work.done()
    assert work.wait() == 7
    assert list(steps) == []
    assert work.done()


def test_the_deadline_of_a_handle_counts_from_waiting() -> None:
    work = Work(repeat(WAITING), lambda: None, lambda: "the sum of 3 arrays", timeout_seconds=0.01)
    time.sleep(0.02)
    assert not work.done(), "asking has no deadline"
    with pytest.raises(DeadlineExceededError, match="the sum of 3 arrays did not end within 0.01 s"):
        work.wait()


def test_a_handle_of_something_that_failed_fails_again() -> None:
    def steps() -> Iterator[bool]:
        yield WAITING
        raise RuntimeError("planted")

    work = Work(steps(), lambda: 7, lambda: "this")
    assert not work.done()
    for again in (work.done, work.wait, work.wait):
        with pytest.raises(RuntimeError, match="planted"):
            again()
