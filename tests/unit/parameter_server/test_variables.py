"""Which rows an index names: as many as it needs, and with them what NumPy returns; when no variable is made."""

from unittest.mock import MagicMock

import numpy as np
import pytest

from mpistrat.parameter_server.strategy import ParameterServerExtended
from mpistrat.parameter_server.variables import select_rows

ARRAY = np.arange(60).reshape(10, 3, 2)


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
        ((slice(1, 7), 1), 6),
        ((2, [0, 2], 1), 1),
        ((2, slice(None, None, -1), [1, 0]), 1),
        ([1, 9, 1, -1], 4),
        ([[1, 2], [3, 4]], 4),
        (([1, 2], 0), 2),
        (([1, 2], slice(None), 0), 2),
        ((np.array([1, 2], np.uint8), ..., 0), 2),
    ],
)
def test_the_rows_and_what_is_taken_of_them_are_what_numpy_returns(index, num_rows):
    rows, inner = select_rows(index, 10)
    assert np.size(rows) == num_rows
    np.testing.assert_array_equal(ARRAY[np.asarray(rows, np.int64)][inner], ARRAY[index])


@pytest.mark.parametrize("index", [None, True, (..., 0), np.ones(10, bool), [True] * 10, ([1, 2], [0, 1]), ([0], None), (), []])
def test_other_indices_name_no_rows(index):
    assert select_rows(index, 10) is None


@pytest.mark.parametrize("index", [10, -11, [3, 10], [-11]])
def test_rows_out_of_range_are_refused(index):
    with pytest.raises(IndexError):
        select_rows(index, 10)


def test_none_is_made_when_the_strategy_is_closed():
    client = MagicMock()
    client.channel.group.configure_mock(task_type="chief", workers=(1,), servers=(2,), number=-1)
    with pytest.raises(RuntimeError, match="the strategy that made the variable was closed"):
        ParameterServerExtended(client, placement="round_robin").create_variable(np.zeros(2))
    client.create.assert_not_called()
