"""What a task does, as other processes read it, and what is under way after an interrupt."""

import _thread
from signal import SIGINT
from types import SimpleNamespace

import pytest

from mpistrat.parameter_server.messages import Activity, Channel
from mpistrat.watch.record import RankFile
from mpistrat.watch.recorder import FlightRecorder
from mpistrat.watch.states import look


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Give an activity, and what tells what another process reads of it."""
    recorder = FlightRecorder(tmp_path / "rank-0", 0, 1)
    monkeypatch.setattr("mpistrat.parameter_server.messages.recorder", lambda: recorder)
    file = RankFile.open(recorder.path)
    return Activity("worker 1"), lambda: look(file)


def test_it_tells_what_runs_and_what_that_waits_for(recorded):
    activity, state = recorded
    assert (state().activity, "no collective yet" in state().doing()) == ("", True)
    activity.set("runs step (function 3)")
    assert state().activity == "worker 1 runs step (function 3)"
    activity.wait_for("an answer of ps 0: read of table")
    assert "worker 1 runs step (function 3), waits for an answer of ps 0: read of table" in state().doing()
    activity.wait_for("")
    assert state().activity == "worker 1 runs step (function 3)"
    activity.set("")
    activity.wait_for("a function")
    assert state().activity == "worker 1 waits for a function"
    activity.wait_for("")
    assert state().activity == ""


def test_a_long_text_is_cut(recorded):
    activity, state = recorded
    activity.set("ä" * 1000)
    assert state().activity.startswith("worker 1 ää")
    assert state().node
    activity.set("runs f")
    assert state().activity == "worker 1 runs f"


def test_an_interrupt_leaves_no_message_half_sent():
    """A peer that has a header waits for the payload."""
    requests, channel = [], SimpleNamespace(failure=RuntimeError)
    with pytest.raises(KeyboardInterrupt):
        Channel._start(channel, requests, _thread.interrupt_main, [(SIGINT,)] * 3)
    assert requests == [None] * 3
