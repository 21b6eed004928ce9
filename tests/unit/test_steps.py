"""Advancing steps: to the end, or to a deadline."""

import os
import time
from itertools import repeat

import pytest

from mpistrat.errors import DeadlineExceededError
from mpistrat.steps import WAITING, WORKED, drive


def test_steps_are_driven_to_the_end_or_an_error():
    seen: list[int] = []

    def steps():
        for index in range(1000):
            seen.append(index)
            yield WORKED if index % 3 else WAITING
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        drive(steps(), lambda: "this")
    assert seen == list(range(1000))


def test_a_deadline_ends_waiting_and_names_what_was_waited_for_or_what_is_overdue():
    started = time.monotonic()
    message = r"all_reduce\(SUM\) did not end within 0\.02 s; not all ranks have arrived"
    with pytest.raises(DeadlineExceededError, match=message) as caught:
        drive(repeat(WAITING), lambda: "all_reduce(SUM)", 0.02)
    assert 0.02 <= time.monotonic() - started < 5
    assert isinstance(caught.value, TimeoutError)
    overdue = DeadlineExceededError("rank 3 does not answer")
    with pytest.raises(DeadlineExceededError, match="^rank 3 does not answer$"):
        drive(repeat(WAITING), lambda: "this", 0.01, lambda: overdue)


def test_who_drives_may_say_how_to_rest():
    rests: list[int] = []
    steps = [WAITING, WAITING, WORKED, WAITING, WORKED, WORKED, WAITING]
    drive(iter(steps), lambda: "this", back_off=rests.append)
    assert rests == [0, 1, 0, 0], "how often in a row there was nothing to do"
    with pytest.raises(DeadlineExceededError):  # who rests long looks at the clock each time
        drive(iter([WAITING] * 3), lambda: "this", 0.01, back_off=lambda _: time.sleep(0.02))


def test_who_waits_on_a_busy_machine_looks_in_time_for_what_ends_the_wait(monkeypatch):
    def verdict():
        raise RuntimeError("a verdict")

    monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(0.01))  # as if other processes had run
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="a verdict"):
        drive(repeat(WAITING), lambda: "this", check=verdict)
    assert time.monotonic() - started < 1


def test_what_is_at_work_is_not_late():
    def steps():
        for _ in range(3):
            time.sleep(0.005)
            yield WORKED

    drive(steps(), lambda: "slow work", 0.001)


def test_a_wait_on_a_shared_core_yields_and_never_sleeps(monkeypatch):
    yields: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(os, "sched_yield", lambda: (sleep(1e-3), yields.append(1)))  # as if another process had run
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"slept for {seconds} s"))
    drive(iter([WAITING] * 5 + [WORKED]), lambda: "a wait")
    assert len(yields) == 5
