"""What is sent of functions, arguments, results and errors, and what a task does meanwhile, as other processes read it."""

import _thread
import sys
import threading
from signal import SIGINT
from types import ModuleType, SimpleNamespace

import cloudpickle
import pytest

from mpistrat.parameter_server import functions
from mpistrat.parameter_server.functions import FunctionTable, dumps_error, loads, loads_error
from mpistrat.parameter_server.messages import Channel, Define
from mpistrat.watch.record import RankFile
from mpistrat.watch.recorder import FlightRecorder
from mpistrat.watch.states import look


class Sent:
    """Stands in for a channel: keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, requests, rank, tag, message, *payload):
        self.sent.append((rank, message))
        requests.append(message)


@pytest.fixture
def table():
    return FunctionTable(Sent())


def test_a_function_is_sent_once_to_each_rank_and_those_of_one_text_are_one(table):
    def double(number):
        return 2 * number

    found = table.find(double)
    for rank, requests in ((1, 1), (2, 1), (1, 0), (2, 0)):
        number = table.send(sent := [], rank, found)
        assert (number, len(sent)) == (0, requests)
        assert table.find(double) is found
    assert table._channel.sent == [(1, Define(0, -1)), (2, Define(0, -1))]
    assert loads(found.pickled.data)(4) == 8
    found = [table.find(lambda number: number + 1) for _ in range(3)]
    assert found[0] is found[1] is found[2]


@pytest.fixture
def this_module_by_value():
    """Have functions of this module pickled as those of a script are: with what they refer to."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


rate = 1.0
rates = {"default": 1.0}


def rate_of_a_helper():
    return rate


def default_rate(number, by=rates):
    return by["default"] * number


@pytest.mark.parametrize(
    "scaled",
    [
        lambda number: rate * number,
        lambda number: sum([rate * one for one in (number,)]),
        lambda number: (lambda: rate * number)(),
        lambda number: rate_of_a_helper() * number,
        lambda number: rates["default"] * number,
        default_rate,
    ],
    ids=["name", "comprehension", "inner function", "helper", "dict changed in place", "default argument"],
)
def test_a_function_is_sent_again_when_what_it_refers_to_has_changed(table, this_module_by_value, monkeypatch, scaled):
    first = table.find(scaled)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "rate", 3.0)
        patch.setitem(rates, "default", 3.0)
        assert loads(table.find(scaled).pickled.data)(2) == 6
    assert table.find(scaled) is first


def test_a_rank_forgets_the_function_that_was_not_called_for_longest(table, monkeypatch):
    monkeypatch.setattr(functions, "_MOST_FUNCTIONS", 3)
    made = [table.find(eval(f"lambda: {number}")) for number in range(4)]
    assert [table.send([], 1, made[which]) for which in (0, 1, 2, 0, 3, 0, 2, 1)] == [0, 1, 2, 0, 3, 0, 2, 1]
    sent = [(0, -1), (1, -1), (2, -1), (3, 1), (1, 3)]
    assert table._channel.sent == [(1, Define(*numbers)) for numbers in sent]


class UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.lock = threading.Lock()


def test_an_error_arrives_with_its_traceback():
    try:
        raise KeyError("missing")
    except KeyError as error:
        arrived = loads_error(dumps_error(error, "worker 1 (rank 3 on a)"))
    assert type(arrived) is KeyError
    assert arrived.args == ("missing",)
    assert "[worker 1 (rank 3 on a)] Traceback" in str(arrived.__cause__)


class TextlessError(UnpicklableError):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(("kind", "text"), [(UnpicklableError, "UnpicklableError: what"), (TextlessError, "TextlessError")])
def test_of_an_error_that_cannot_be_pickled_the_text_or_name_arrives(kind, text):
    arrived = loads_error(dumps_error(kind("what", 2), "worker 0"))
    assert (type(arrived), str(arrived)) == (RuntimeError, text)


def test_of_an_error_that_cannot_be_loaded_here_the_text_arrives(monkeypatch):
    class ThereError(Exception):
        pass

    there = ModuleType("known_there_alone")
    ThereError.__module__, ThereError.__qualname__, there.ThereError = there.__name__, "ThereError", ThereError
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, there.__name__, there)
        data = dumps_error(ThereError("what"), "worker 0")
    arrived = loads_error(data)
    assert (type(arrived), str(arrived)) == (RuntimeError, "ThereError: what")


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Give what records what a task does, and what tells what another process reads of it."""
    recorder = FlightRecorder(tmp_path / "rank-0", 0, 1)
    monkeypatch.setattr("mpistrat.parameter_server.messages.recorder", lambda: recorder)
    file = RankFile.open(recorder.path)
    channel = object.__new__(Channel)
    channel._task, channel._does = "worker 1", ""
    return channel.record, lambda: look(file)


def test_it_tells_what_runs_and_what_that_waits_for_cut_if_it_is_long(recorded):
    record, state = recorded
    assert (state().activity, "no collective yet" in state().doing()) == ("", True)
    record("runs step (function 3)")
    assert state().activity == "worker 1 runs step (function 3)"
    record(waits_for="an answer of ps 0: read of table")
    assert "worker 1 runs step (function 3), waits for an answer of ps 0: read of table" in state().doing()
    record()
    assert state().activity == "worker 1 runs step (function 3)"
    record("")
    record(waits_for="a function")
    assert state().activity == "worker 1 waits for a function"
    record()
    assert state().activity == ""
    record, state = recorded
    record("ä" * 1000)
    assert state().activity.startswith("worker 1 ää")
    assert state().node
    record("runs f")
    assert state().activity == "worker 1 runs f"


def test_an_interrupt_leaves_no_message_half_sent():
    """A peer that has a header waits for the payload."""
    requests, channel = [], SimpleNamespace(failure=RuntimeError)
    with pytest.raises(KeyboardInterrupt):
        Channel._start(channel, requests, _thread.interrupt_main, [(SIGINT,)] * 3)
    assert requests == [None] * 3
