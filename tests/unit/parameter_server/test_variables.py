"""Which rows an index has sent, and that they are what NumPy returns; when no variable is made."""

from unittest.mock import MagicMock

import numpy as np
import pytest

from mpistrat.parameter_server import variables
from mpistrat.parameter_server.client import VariableRef
from mpistrat.parameter_server.strategy import ParameterServerExtended
from mpistrat.parameter_server.variables import ServerVariable, StoredVariable

ARRAY = np.arange(60).reshape(10, 3, 2)


class Servers:
    """Stands in for a client: has `ARRAY`, and counts the rows that it sends."""

    num_rows = 0

    def read(self, parts):
        for _, start, target in parts:
            target[...] = ARRAY[start : start + len(target)]
            self.num_rows += len(target)

    def read_rows(self, parts):
        for _, rows, target in parts:
            target[...] = ARRAY[rows]
            self.num_rows += len(target)


@pytest.fixture
def servers(monkeypatch):
    found = Servers()
    monkeypatch.setattr(variables, "current_client", lambda group: found)
    return found


@pytest.fixture
def table(servers):
    return ServerVariable("table", VariableRef(0, 0, 0, "table", ARRAY.nbytes), ARRAY.shape, ARRAY.dtype, trainable=True)


@pytest.mark.parametrize(
    ("index", "num_rows"),
    [
        (3, 1),
        (-1, 1),
        (np.int64(4), 1),
        (slice(2, 9), 7),
        (slice(None, None, -2), 5),
        (slice(8, 1, -3), 3),
        (slice(4, 4), 0),
        (slice(7, 2), 0),
        (slice(2, 7, -1), 0),
        (..., 10),
        (None, 10),
        (True, 10),
        ((..., 0), 10),
        (np.arange(10) > 6, 10),
        (([1, 2], [0, 1]), 10),
        (([0], None), 10),
        ((), 10),
        ([], 10),
        ((slice(1, 7), 1), 6),
        ((2, [0, 2], 1), 1),
        ((2, slice(None, None, -1), [1, 0]), 1),
        ([1, 9, 1, -1], 2),
        ([[1, 2], [3, 4]], 4),
        (([1, 2], 0), 2),
        (([1, 2], slice(None), 0), 2),
        ((np.array([1, 2], np.uint8), ..., 0), 2),
    ],
)
def test_an_index_has_the_rows_sent_that_it_names_and_returns_what_numpy_does(servers, table, index, num_rows):
    np.testing.assert_array_equal(table[index], ARRAY[index])
    assert servers.num_rows == num_rows


@pytest.mark.parametrize("index", [10, -11, [3, 10], [-11]])
def test_rows_out_of_range_are_refused(table, index):
    with pytest.raises(IndexError):
        table[index]


def test_none_is_made_when_the_strategy_is_closed():
    client = MagicMock()
    client.channel.group.configure_mock(task_type="chief", workers=(1,), servers=(2,), number=-1)
    with pytest.raises(RuntimeError, match="the strategy that made the variable was closed"):
        ParameterServerExtended(client, placement="round_robin").create_variable(np.zeros(2))
    client.create.assert_not_called()


def test_what_a_function_on_a_server_gets_can_be_used_like_an_array():
    array = np.arange(6.0).reshape(3, 2)
    stored = StoredVariable("stored", array)
    assert (stored.shape, stored.dtype, len(stored), (stored * 2)[2, 1], np.sum(stored)) == ((3, 2), np.float64, 3, 10, 15)
    stored.value += 1
    stored.value = stored / 2
    np.testing.assert_array_equal(array, np.arange(1.0, 7).reshape(3, 2) / 2)
    with pytest.raises(TypeError, match="cannot be the target of an in-place operation"):
        stored += 1
