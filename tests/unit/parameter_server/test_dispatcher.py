"""What the dispatcher says of scheduled functions while a thread beside the program takes their results."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from mpistrat.errors import CancelledError
from mpistrat.parameter_server import dispatcher
from mpistrat.parameter_server.dispatcher import Dispatcher, RemoteValue, ScheduledCall
from mpistrat.parameter_server.functions import Pickled, dumps
from mpistrat.parameter_server.messages import Received, Result


def made(monkeypatch, results):
    """Return a dispatcher of one worker that gets some results, and then none."""
    channel = MagicMock(lost=frozenset(), survives=False)
    channel.group.workers, channel.payload.return_value, channel.unfinished.return_value = (1,), b"", []
    receiver = SimpleNamespace(peek=lambda: next(results, None), accept=lambda: None)
    monkeypatch.setattr(dispatcher, "Receiver", lambda *arguments: receiver)
    client = MagicMock(channel=channel, dropped=[])
    client.functions.send.return_value = 0
    return Dispatcher(client)


def test_it_is_idle_only_when_the_result_that_has_come_is_there(monkeypatch):
    value, looked = MagicMock(), []
    call = ScheduledCall(MagicMock(number=0), Pickled(b"", []), value)
    found = made(monkeypatch, iter([None, Received(1, Result(call.number, False), -1, 0, memoryview(b""))]))
    monkeypatch.setattr(found, "_beside", MagicMock())
    found.submit(call)
    with ThreadPoolExecutor(1) as program:

        def look(data):
            asked = program.submit(found.is_idle)
            time.sleep(0.05)
            looked.append(asked.done() and asked.result())

        value.set_data = look
        assert not found.is_idle()
        found.pump()
    assert looked == [False]
    assert found.is_idle()


def test_an_error_is_raised_once_where_two_threads_wait(monkeypatch):
    found = made(monkeypatch, iter([]))
    found._error = ValueError("of a function")
    monkeypatch.setattr(found, "wait", lambda *arguments: setattr(found, "_error", None))  # the other one raises it meanwhile
    found.raise_error()


def test_a_value_that_another_thread_has_loaded_meanwhile_is_there(monkeypatch):
    found = [dumps(3, "a result"), None]  # at a first and a second look
    monkeypatch.setattr(RemoteValue, "_data", property(lambda _: found.pop(0), lambda *_: None), raising=False)
    assert RemoteValue(MagicMock()).fetch() == 3


def test_an_interrupt_loses_no_call(monkeypatch):
    call = ScheduledCall(MagicMock(number=0), Pickled(b"", []), RemoteValue(MagicMock()))
    found = made(monkeypatch, iter([None, None, Received(1, Result(call.number, False), -1, 0, memoryview(b""))]))
    monkeypatch.setattr(found, "_beside", MagicMock())
    send = found._client.functions.send
    send.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        found.submit(call)
    send.side_effect = None
    found.pump()
    assert (send.call_count, found.is_idle()) == (2, False)
    call.value.set_data = MagicMock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        found.pump()
    assert found.is_idle()
    with pytest.raises(CancelledError, match="was given up"):
        call.value.fetch()
