"""What a server does with requests, and what a function on a server gets."""

import pickle
from functools import partial
from unittest.mock import MagicMock

import numpy as np
import pytest

from mpistrat.parameter_server.messages import Channel, Read, Received, Run, Write
from mpistrat.parameter_server.server import VariableServer
from mpistrat.parameter_server.variables import StoredVariable
from mpistrat.state.changes import METHODS


@pytest.mark.parametrize("change", [Write(0, 1, 0), Write(0, METHODS.index("scatter_add"), 3), Run(7, 0, 0, False)], ids=repr)
def test_a_variable_is_changed_only_when_no_answer_is_being_sent_from_its_array(change):
    array, other, waited = np.zeros(3), np.zeros(3), []
    channel = MagicMock(survives=False)
    channel.have_ended.return_value = False
    channel.wait.side_effect = lambda requests, *given, **named: waited.append((requests, array.tolist()))
    server = VariableServer(channel)
    server._variables.update({0: StoredVariable("read", array), 1: StoredVariable("other", other)})
    for variable, request in ((0, "of read"), (1, "of other")):
        channel.send_bare.return_value = [request]
        read = Read(5, variable, 0, 3)
        server.read(read, Received(2, read, -1, 0, None))

    def add(variable):
        variable.value += 1

    channel.receive_payload.side_effect = partial(Channel.receive_payload, channel)
    channel.payload.return_value = pickle.dumps(((), {}))
    server._functions[3, 0] = lambda worker: add
    inline = memoryview((b"" if change == Write(0, 1, 0) else np.arange(3).tobytes()) + np.ones(3).tobytes())
    getattr(server, type(change).__name__.lower())(change, Received(3, change, -1, inline.nbytes, inline))
    assert waited == [(["of read"], [0, 0, 0])]
    assert array.tolist() == [1, 1, 1]


def test_what_a_function_on_a_server_gets_can_be_used_like_an_array():
    array = np.arange(6.0).reshape(3, 2)
    stored = StoredVariable("stored", array)
    assert (stored.shape, stored.dtype, len(stored), (stored * 2)[2, 1], np.sum(stored)) == ((3, 2), np.float64, 3, 10, 15)
    stored.value += 1
    stored.value = stored / 2
    np.testing.assert_array_equal(array, np.arange(1.0, 7).reshape(3, 2) / 2)
    stored.numpy()[...] = stored.sparse_read([0])[...] = 0  # copies
    np.testing.assert_array_equal(stored.sparse_read([[2], [0]]), array[[[2], [0]]])
    with pytest.raises(TypeError, match="cannot be the target of an in-place operation"):
        stored += 1
