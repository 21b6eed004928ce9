"""The hooks of an uncaught exception, on a job that only pretends to end."""

import atexit
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mpistrat.launch import abort


class FakeJob(SimpleNamespace):
    """Rank 0 of 2, whose Abort says so and then, as MPI's does, never returns."""

    rank = 0
    size = 2

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.released = threading.Event()

    def Abort(self, code: int) -> None:  # noqa: N802 - as mpi4py has it
        self.code = code
        self.aborted.set()
        self.released.wait(30)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJob]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(atexit, "register", lambda handler: None)
    fake = FakeJob()
    abort.install(fake)  # type: ignore[arg-type]
    yield fake
    fake.released.set()


def test_of_two_threads_that_raise_one_speaks(job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    threads = [threading.Thread(target=lambda: 1 // 0, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert job.aborted.wait(10)
    for thread in threads:
        thread.join(0.2)
    assert (job.code, capsys.readouterr().err.count("ZeroDivisionError")) == (1, 1)


def test_job_ends_even_where_nothing_can_be_printed(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.released.set()
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(AttributeError):
        sys.excepthook(ValueError, ValueError("lost"), None)
    assert job.code == 1


def test_hook_of_a_test_runner_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(arguments: threading.ExceptHookArgs) -> None:
        """Stand for a test runner's hook."""

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", collect)
    monkeypatch.setattr(atexit, "register", lambda handler: None)
    abort.install(FakeJob())  # type: ignore[arg-type]
    assert threading.excepthook is collect
    assert sys.excepthook is not sys.__excepthook__
