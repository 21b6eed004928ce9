"""The files of a checkpoint: pieces of arrays, what a stop at any moment leaves, and bytes that have changed."""

from __future__ import annotations

import os
import threading
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat
from mpistrat.checkpoint import files
from mpistrat.checkpoint.tree import Spec
from mpistrat.errors import CheckpointError

pytest.importorskip("safetensors")

_DTYPES = st.sampled_from(["float64", "float32", "bfloat16", "int8", "bool", "complex128"])
_SPECS = st.dictionaries(st.text("abc", min_size=1), st.builds(Spec, _DTYPES, st.tuples(st.integers(0, 9), st.integers(0, 9))))


@given(arrays=_SPECS, num_parts=st.integers(1, 9))
def test_the_parts_hold_each_element_once_in_equal_shares(arrays, num_parts):
    parts = [files.pieces_of(arrays, part, num_parts) for part in range(num_parts)]
    for name, spec in arrays.items():
        bounds = [(piece.start, piece.stop) for part in parts for piece in part if piece.name == name]
        assert [element for bound in bounds for element in range(*bound)] == list(range(prod(spec.shape)))
    sizes = [sum((piece.stop - piece.start) * np.dtype(arrays[piece.name].dtype).itemsize for piece in part) for part in parts]
    assert max(sizes) - min(sizes) <= 2 * 16


class _Stop(BaseException):
    """What stops a save, as the end of a job does: nobody handles it."""


_CALLS = [(os, "fsync"), *((Path, name) for name in ("rename", "unlink", "mkdir", "rmdir", "write_text"))]


class _Stopper:
    """Stops before or after the n-th call that changes files."""

    def __init__(self, monkeypatch, number, is_after):
        self.count, self._number, self._is_after = 0, number, is_after
        for owner, name in _CALLS:
            monkeypatch.setattr(owner, name, self._stopping(getattr(owner, name)))

    def _stopping(self, call):
        def stopping(*args, **kwargs):
            self.count += 1
            if self.count == self._number and not self._is_after:
                raise _Stop
            result = call(*args, **kwargs)
            if self.count == self._number:
                raise _Stop
            return result

        return stopping


@pytest.mark.parametrize("is_after", [False, True])
def test_whenever_a_save_stops_the_last_checkpoint_or_the_one_before_is_whole(tmp_path, monkeypatch, is_after):
    number, was_stopped = 0, True
    while was_stopped:
        number += 1
        directory = tmp_path / str(number)
        state = {"step": 1, "w": np.full(5, 1.0)}
        manager = mpistrat.CheckpointManager(mpistrat.Checkpoint(state=state), directory, max_to_keep=1)
        manager.save(1, wait=True)
        state["step"], state["w"][:] = 2, 2.0
        with monkeypatch.context() as patched:
            stopper = _Stopper(patched, number, is_after)
            # on this thread, so that the stop ends the save
            patched.setattr(threading.Thread, "start", threading.Thread.run)
            patched.setattr(threading.Thread, "join", lambda thread: None)
            try:
                manager.save(2, wait=True)
            except _Stop:
                was_stopped = True
            else:
                was_stopped = stopper.count >= number
        state.update(step=0, w=np.zeros(5))
        again = mpistrat.CheckpointManager(mpistrat.Checkpoint(state=state), directory)
        step = again.restore()
        assert step in (1, 2)
        assert state["step"] == step
        np.testing.assert_array_equal(state["w"], np.full(5, float(step)))
        again.save(3, wait=True)
        assert [files.verify(Path(path)).step for path in again.checkpoints][-1] == 3
    assert number > 10


@pytest.fixture
def folder(tmp_path):
    checkpoint = mpistrat.Checkpoint(w={"a": np.arange(100.0), "b": np.ones(3, bool)})
    return Path(checkpoint.save(tmp_path / "one", wait=True))


def test_a_byte_that_has_changed_is_found_in_each_file(folder):
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for place in range(0, len(good), 7):
            if good[place : place + 1].isspace():  # which pads the header of safetensors
                continue
            path.write_bytes(good[:place] + bytes([good[place] ^ 0x11]) + good[place + 1 :])
            with pytest.raises(CheckpointError):
                files.verify(folder)
        path.write_bytes(good)
    assert files.verify(folder).num_bytes == 803


def test_a_file_that_is_cut_short_or_missing_is_found(folder):
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        path.write_bytes(good[:-1])
        with pytest.raises(CheckpointError, match=path.name):
            files.verify(folder)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name} does not exist"):
            files.verify(folder)
        path.write_bytes(good)


def test_a_manifest_of_a_newer_version_is_refused(folder):
    path = folder / files.MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="has format 2, and this version of mpistrat reads format 1"):
        files.read_manifest(folder)
