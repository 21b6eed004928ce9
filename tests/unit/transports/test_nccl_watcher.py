"""The thread that looks after enqueued work of NCCL: whatever happens on it, nobody waits for it for ever."""

from __future__ import annotations

import threading
import time

import pytest

from mpistrat.errors import DeadlineExceededError
from mpistrat.steps import drive
from mpistrat.transports import nccl
from mpistrat.transports.base import Watched
from mpistrat.transports.nccl import NcclWatcher
from tests.gpu.stand_in import UNFINISHED, StandInDevice


@pytest.fixture
def device():
    device = StandInDevice()
    device.current_stream().put(lambda: UNFINISHED)
    yield device
    device.close()


def watched(tell_peers=lambda: None):
    return Watched(lambda: False, lambda: 0.0, lambda: False, tell_peers, lambda: False)


def give_up(seconds_over):
    raise DeadlineExceededError(f"planted: {seconds_over > 0}")


def watcher(device, check):
    made = NcclWatcher("watcher", device, check, give_up, watched())
    made.add(device.current_stream().record())
    return made


def fail():
    raise RuntimeError("planted: cudaErrorLaunchFailure")


def test_what_cuda_raises_ends_the_wait_too(device):
    made = watcher(device, fail)
    made.note_raised()
    drive(made.settle(), lambda: "the watcher", 10.0)
    made.add(device.current_stream().record())
    drive(made.settle(), lambda: "the watcher", 10.0)
    made.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_raised", [False, True])
def test_a_failure_that_the_program_does_not_see_is_raised_by_the_thread(device, monkeypatch, is_raised):
    found = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(f"{arguments.exc_value}"))
    monkeypatch.setattr(nccl, "UNSEEN_SECONDS", 30.0 if is_raised else 0.01)
    made = watcher(device, fail)
    drive(made.settle(), lambda: "the watcher", 10.0)
    if is_raised:
        made.note_raised()
        made.stop()
    made._thread.join(10.0)
    assert found == ([] if is_raised else ["planted: cudaErrorLaunchFailure"])


def test_an_abort_that_blocks_holds_nobody_up(device, monkeypatch):
    monkeypatch.setattr(nccl, "STOP_SECONDS", 0.05)
    released, entered = threading.Event(), threading.Event()

    def check():
        entered.set()
        released.wait()

    made = watcher(device, check)
    assert entered.wait(10.0)
    begun = time.monotonic()
    made.stop()
    assert time.monotonic() - begun < 5.0
    released.set()


def test_to_settle_waits_for_the_work_and_not_for_the_thread(monkeypatch):
    monkeypatch.setattr(nccl, "CHECK_SECONDS", 60.0)
    device = StandInDevice()
    stream, ends = device.current_stream(), time.monotonic() + 0.2
    stream.put(lambda: None if time.monotonic() > ends else UNFINISHED)
    made = NcclWatcher("watcher", device, lambda: None, give_up, watched())
    event = stream.record()
    made.add(event)
    drive(made.settle(), lambda: "the watcher", 10.0)
    assert time.monotonic() > ends
    stream.put(lambda: UNFINISHED)
    made.add(stream.record(event))
    assert next(made.settle(), None) is not None, "what came after the event was recorded again has not ended"
    made.stop()
    device.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_operation_that_misses_its_deadline_is_given_up_and_one_that_has_ended_is_not(device, monkeypatch):
    found, told = [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(f"{arguments.exc_value}"))
    monkeypatch.setattr(nccl, "UNSEEN_SECONDS", 0.01)
    made = NcclWatcher("watcher", device, lambda: None, give_up, watched(told.set))
    ended = device.stream().record()
    made.add(ended, time.monotonic() + 0.05)
    time.sleep(0.3)
    assert made.spare_event() is ended
    assert not told.is_set()
    made.add(device.current_stream().record(), time.monotonic() + 0.05)
    made._thread.join(10.0)
    assert told.is_set()
    assert found == ["planted: True"]
