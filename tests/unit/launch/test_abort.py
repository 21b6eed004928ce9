"""The hooks of an uncaught exception, on a job that only pretends to end, and tracebacks, which end with the user's line."""

import atexit
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat
from mpistrat.launch import abort
from mpistrat.strategy.extended import operand_or_slices
from mpistrat.structures import each_leaf, leaf_names
from mpistrat.text import parse_spans
from mpistrat.watch import watcher
from mpistrat.watch.record import RankFile
from mpistrat.watch.recorder import FlightRecorder


class FakeJob(SimpleNamespace):
    """Rank 0 of 2, whose Abort says so and then, as MPI's does, never returns."""

    rank = 0
    size = 2

    def __init__(self):
        self.aborted = threading.Event()
        self.released = threading.Event()

    def Abort(self, code):  # noqa: N802 - as mpi4py has it
        self.code = code
        self.aborted.set()
        self.released.wait(30)


def collect(arguments):
    """Stand for a test runner's hook."""


@pytest.fixture
def job(request, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", getattr(request, "param", threading.__excepthook__))
    monkeypatch.setattr(atexit, "register", lambda handler: None)
    monkeypatch.setattr(abort, "_ending", threading.Lock())
    fake = FakeJob()
    abort.install(fake)
    yield fake
    fake.released.set()


def test_of_two_threads_that_raise_one_speaks(job, capsys):
    threads = [threading.Thread(target=lambda: 1 // 0, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert job.aborted.wait(10)
    for thread in threads:
        thread.join(0.2)
    assert (job.code, capsys.readouterr().err.count("ZeroDivisionError")) == (1, 1)


def test_where_ranks_go_on_without_lost_ones_the_watcher_tells_them_to_end(job, monkeypatch, capsys):
    told = []
    monkeypatch.setattr(watcher, "MPI", SimpleNamespace(COMM_WORLD=job))
    monkeypatch.setattr(abort, "_survivors", "those that go on")
    monkeypatch.setattr(abort, "_tell", lambda *what: told.append(what))
    monkeypatch.setattr(abort, "leave", told.append)
    job.released.set()
    watcher._end_job(mpistrat.errors.UnavailableError("planted"), sys._getframe(), RankFile(FlightRecorder(None).memory))
    assert told == [("those that go on", 1), 1]
    assert "UnavailableError: planted" in capsys.readouterr().err


def test_job_ends_even_where_nothing_can_be_printed(job, monkeypatch):
    job.released.set()
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(AttributeError):
        sys.excepthook(ValueError, ValueError("lost"), None)
    assert job.code == 1


@pytest.mark.parametrize("job", [collect], indirect=True)
def test_hook_of_a_test_runner_stays(job):
    assert threading.excepthook is collect
    assert sys.excepthook is not sys.__excepthook__


def test_the_code_of_an_exit_that_is_caught_can_be_changed():
    with pytest.raises(SystemExit) as caught:
        abort._exit(3)
    caught.value.code = 4
    assert (caught.value.code, caught.value.args) == (4, (3,))


_HINT = "MPISTRAT_TRACEBACK=full"


def _text_of(call):
    try:
        call()
    except Exception as error:
        return abort.format_exception(error, "rank 3 on node1").splitlines()
    raise AssertionError("nothing was raised")


def _cause():
    try:
        raise KeyError("w")
    except KeyError as error:
        raise ValueError("two\nlines") from error


def test_every_line_says_whose_it_is_and_causes_are_told_without_errors_within_the_library():
    lines = _text_of(_cause)
    assert all(line.startswith("[rank 3 on node1] ") for line in lines)
    assert "[rank 3 on node1] KeyError: 'w'" in lines
    assert lines[-2:] == ["[rank 3 on node1] ValueError: two", "[rank 3 on node1] lines"]
    wrong = {"b": np.ones(2, "U3")}
    lines = _text_of(lambda: each_leaf(operand_or_slices, [*wrong.values()], lambda: leaf_names(wrong)))
    assert not [line for line in lines if "During handling" in line or "mpistrat/arrays.py" in line]
    assert _HINT in lines[-2]
    assert "value['b'] has dtype <U3" in lines[-1]
    # one that arose there without a raise keeps its frames
    assert "mpistrat/text.py" in "".join(_text_of(lambda: parse_spans(7)))


def test_frames_of_the_library_are_left_out_unless_they_are_asked_for(monkeypatch):
    lines = _text_of(lambda: mpistrat.experimental.CommunicationOptions(bytes_per_pack=-1))
    places = [line for line in lines if "  File " in line]
    assert "test_abort.py" in places[-1]
    assert not [line for line in places if "mpistrat/communicator" in line]
    assert _HINT in lines[-2]
    assert "bytes_per_pack" in lines[-1]
    monkeypatch.setenv("MPISTRAT_TRACEBACK", "full")
    lines = _text_of(lambda: mpistrat.experimental.CommunicationOptions(bytes_per_pack=-1))
    assert [line for line in lines if "mpistrat/communicator/options.py" in line]
    assert not [line for line in lines if _HINT in line]
