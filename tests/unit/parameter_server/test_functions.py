"""What is sent of functions, arguments, results and errors."""

import gc
import threading

import numpy as np
import pytest

from mpistrat.parameter_server.frames import Op
from mpistrat.parameter_server.functions import FunctionTable, dumps, dumps_error, loads, loads_error


class Sent:
    """Stands in for a channel: keeps what is sent."""

    def __init__(self):
        self.frames = []

    def send(self, rank, tag, op, *payload, first=0, **numbers):
        self.frames.append((rank, op, first))
        return []


@pytest.fixture
def table():
    return FunctionTable(Sent())


def test_a_function_is_sent_once_to_each_rank(table):
    def double(number):
        return 2 * number

    found = table.find(double)
    for rank in (1, 2, 1, 2):
        table.send(found, rank)
        assert table.find(double) is found
    assert table._channel.frames == [(1, Op.DEFINE, 0), (2, Op.DEFINE, 0)]
    assert loads(found.data)(4) == 8


def test_a_function_is_sent_again_when_a_name_in_it_stands_for_something_else(table):
    rate = 1.0

    def scaled(number):
        return rate * number

    first = table.find(scaled)
    rate = 3.0
    assert loads(table.find(scaled).data)(2) == 6
    rate = 1.0
    assert table.find(scaled) is first


def test_functions_of_the_same_text_are_one(table):
    found = [table.find(lambda number: number + 1) for _ in range(3)]
    assert found[0] is found[1] is found[2]


def test_a_function_that_nobody_can_call_any_more_is_forgotten(table):
    table.send(table.find(lambda: "early"), 1)
    for number in range(64):  # as many recent ones are kept
        table.find(eval(f"lambda: {number}"))
    gc.collect()
    table.send(table.find(lambda: "late"), 2)
    assert (1, Op.FORGET, 0) in table._channel.frames


def test_what_cannot_be_called_is_refused(table):
    with pytest.raises(TypeError, match="got 3"):
        table.find(3)


def test_what_cannot_be_pickled_is_refused(table):
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"function .*<lambda> cannot be sent to another rank: TypeError: .*lock"):
        table.find(lambda hold=lock: hold)


@pytest.mark.parametrize(
    "value", [None, 3, "text", (1, [2.5, {"a": b"c"}]), {"x": np.float32(2)}, lambda: 4, (np.arange(3),), {3: 4}]
)
def test_values_arrive(value):
    arrived = loads(dumps(value, "it"))
    if callable(value):
        assert arrived() == value()
    elif isinstance(value, tuple) and isinstance(value[0], np.ndarray):
        np.testing.assert_array_equal(arrived[0], value[0])
    else:
        assert arrived == value


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


def test_of_an_error_that_cannot_be_pickled_the_text_arrives():
    arrived = loads_error(dumps_error(UnpicklableError("what", 2), "worker 0"))
    assert type(arrived) is RuntimeError
    assert str(arrived) == "UnpicklableError: what"
