"""The thread that looks after enqueued work of NCCL: whatever happens on it, nobody waits for it for ever."""

import threading
import time

import pytest

from mpistrat.errors import DeadlineExceededError
from mpistrat.steps import drive
from mpistrat.transports import nccl_watcher
from mpistrat.transports.base import Watched
from mpistrat.transports.nccl_watcher import NcclWatcher
from tests.gpu.stand_in import UNFINISHED, StandInDevice


@pytest.fixture
def device():
    device = StandInDevice()
    device.current_stream().put(lambda: UNFINISHED)
    yield device
    device.close()


def watched(tell_peers=lambda: None, seconds=0.0):
    ends = lambda: time.monotonic() + seconds if seconds else 0.0  # noqa: E731
    return Watched(lambda: False, ends, lambda: False, tell_peers, lambda: False)


def give_up(seconds):
    raise DeadlineExceededError(f"planted: {seconds:.1f} s")


def limited(made, stream, work):
    """Put work with a deadline on a stream."""
    limit = made.begin_limit(stream)
    stream.put(work)
    made.add(stream.record(), limit)


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
    monkeypatch.setattr(nccl_watcher, "UNSEEN_SECONDS", 30.0 if is_raised else 0.01)
    made = watcher(device, fail)
    drive(made.settle(), lambda: "the watcher", 10.0)
    if is_raised:
        made.note_raised()
        made.stop()
    made._thread.join(10.0)
    assert found == ([] if is_raised else ["planted: cudaErrorLaunchFailure"])


def test_an_abort_that_blocks_holds_nobody_up(device, monkeypatch):
    monkeypatch.setattr(nccl_watcher, "STOP_SECONDS", 0.05)
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
    monkeypatch.setattr(nccl_watcher, "CHECK_SECONDS", 60.0)
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
def test_a_deadline_counts_from_when_the_gpu_comes_to_the_operation(monkeypatch):
    found, told, device = [], threading.Event(), StandInDevice()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(f"{arguments.exc_value}"))
    monkeypatch.setattr(nccl_watcher, "UNSEEN_SECONDS", 0.01)
    made = NcclWatcher("watcher", device, lambda: None, give_up, watched(told.set, 0.4))
    stream = device.current_stream()

    def takes(seconds, began=[]):  # noqa: B006 - of all that follow each other
        def work():
            began.append(time.monotonic())
            return UNFINISHED if time.monotonic() < began[0] + seconds else began.clear()

        return work

    for _ in range(5):  # the host is ahead of the GPU
        limited(made, stream, takes(0.2))
    drive(made.settle(), lambda: "the watcher", 10.0)
    assert not told.is_set()
    limited(made, stream, lambda: UNFINISHED)
    made._thread.join(10.0)
    assert told.is_set()
    assert found == ["planted: 0.4 s"]
    device.close()
