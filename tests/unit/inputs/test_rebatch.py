"""Batches split into shares, and parts joined to batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.rebatch import batched, num_rows, own_parts, share, share_sizes
from tests.other_arrays import StandardArray


def test_every_array_of_a_nest_is_cut_into_no_more_parts_than_there_may_be():
    batch = {"x": np.arange(12).reshape(4, 3), "rest": (np.arange(4), [np.zeros((4, 2, 2), np.float16)])}
    found = share(batch, 1, 2)
    assert found["x"].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert found["rest"][0].tolist() == [2, 3]
    empty = share(batch, 4, 5)
    assert (empty["x"].shape, empty["rest"][1][0].shape, empty["rest"][1][0].dtype) == ((0, 3), (0, 2, 2), np.float16)
    assert own_parts(1 << 16, 1, 2) == range(1 << 15, 1 << 16)
    with pytest.raises(InvalidArgumentError, match="at least 2, one for each rank, and at most 65536; got 1000000000"):
        own_parts(10**9, 1, 2)


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 9), st.booleans())
def test_parts_of_any_size_become_batches(sizes, batch_size, drop):
    rows = np.arange(sum(sizes))
    parts = [{"a": part, "b": part.astype(float)} for part in np.split(rows, np.cumsum(sizes)[:-1])] if sizes else []
    batches = list(batched(iter(parts), [batch_size], drop))
    whole = len(rows) // batch_size
    assert [len(batch["a"]) for batch in batches[:whole]] == [batch_size] * whole
    assert len(batches) == whole + (len(rows) % batch_size > 0 and not drop)
    joined = [row for batch in batches for row in batch["a"].tolist()]
    assert joined == rows[: len(joined)].tolist() == [row for batch in batches for row in batch["b"].tolist()]


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(1, 9), st.integers(1, 5))
def test_what_replicas_cut_across_batches_adds_up_to_a_batch_in_each_step(sizes, batch_size, num_replicas):
    num_rows = sum(sizes)
    parts = np.split(np.arange(num_rows), np.cumsum(sizes)[:-1]) if sizes else []
    seen = []
    for replica in range(num_replicas):
        shares = share_sizes(batch_size, replica, num_replicas)
        seen.append([piece.tolist() for piece in batched(iter(parts), shares, drop_remainder=False)])
        assert [row for piece in seen[-1] for row in piece] == list(range(num_rows))
        assert len(seen[-1][0] if seen[-1] else ()) <= shares[0]
    whole = num_rows // batch_size * num_replicas
    for step in zip(*(cut[:whole] for cut in seen), strict=True):
        assert sum(map(len, step)) == batch_size


class Rows(StandardArray):
    """Such an array as a dataset can cut."""

    @property
    def shape(self):
        return self._array.shape

    def __getitem__(self, rows):
        return Rows(self._array[rows])


def test_joined_batches_stay_of_their_kind():
    joined = list(batched(iter([[Rows(np.arange(3))], [Rows(np.arange(3, 6))]]), [4, 1], drop_remainder=False))
    assert {isinstance(batch[0], StandardArray) for batch in joined} == {True}
    assert [batch[0].numpy().tolist() for batch in joined] == [[0, 1, 2, 3], [4], [5]]


def test_parts_may_use_the_memory_of_those_before_them():
    def parts():
        memory = np.empty(3, int)
        for first in range(0, 12, 3):
            memory[:] = range(first, first + 3)
            yield memory

    batches = [share(batch, 0, 1) for batch in batched(parts(), [4], drop_remainder=False)]
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    parts = [np.arange(7), np.arange(7, 16)]
    batches = list(batched(iter(parts), [3], drop_remainder=False))
    shared = [any(np.shares_memory(batch, part) for part in parts) for batch in batches]
    assert shared == [True, True, False, True, True, False]


@pytest.mark.parametrize(
    ("element", "found"),
    [
        (3.0, "element is 3.0"),
        ([1, 2], r"element\[0\] is 1, element\[1\] is 2"),
        (np.float32(2), r"element has shape \(\)"),
        ((np.zeros((2, 5)), np.zeros(())), r"element\[0\] has shape \(2, 5\), element\[1\] has shape \(\)"),
        ({"x": np.zeros(3), "y": np.zeros(2)}, r"element\['x'\] has shape \(3,\), element\['y'\] has shape \(2,\)"),
        ((), "an element without arrays"),
        (None, "an element without arrays"),
    ],
)
def test_what_is_not_a_batch_says_so(element, found):
    with pytest.raises(InvalidArgumentError, match=rf"every element of a dataset must be a batch.*; got {found}\. Batch the"):
        num_rows(element)
