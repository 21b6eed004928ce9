"""The files of a checkpoint: pieces of arrays, and bytes that have changed."""

import json
import mmap
from math import inf, prod
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import mpistrat
from mpistrat.checkpoint import files
from mpistrat.checkpoint.tree import Spec
from mpistrat.errors import CheckpointError

_DTYPES = st.sampled_from(["float64", "float32", "bfloat16", "int8", "bool", "complex128"])
_SPECS = st.dictionaries(st.text("abc", min_size=1), st.builds(Spec, _DTYPES, st.tuples(st.integers(0, 9), st.integers(0, 9))))


@given(arrays=_SPECS, num_parts=st.integers(1, 9))
def test_the_parts_hold_each_element_once_in_equal_shares(arrays, num_parts):
    parts = [files.pieces_of(tuple(arrays.items()), part, num_parts) for part in range(num_parts)]
    for name, spec in arrays.items():
        bounds = [(piece.start, piece.stop) for part in parts for piece in part if piece.name == name]
        assert [element for bound in bounds for element in range(*bound)] == list(range(prod(spec.shape)))
    sizes = [sum((piece.stop - piece.start) * np.dtype(arrays[piece.name].dtype).itemsize for piece in part) for part in parts]
    assert max(sizes) - min(sizes) <= 2 * 16


@pytest.fixture
def folder(tmp_path):
    checkpoint = mpistrat.Checkpoint(w={"a": np.arange(100.0), "b": np.ones(3, bool)})
    return Path(checkpoint.save(tmp_path / "one", wait=True))


def changed(good):
    """Yield the bytes of a file with every seventh of them changed in turn, cut short, and longer."""
    for place in range(0, len(good), 7):
        yield good[:place] + bytes([good[place] ^ 0x11]) + good[place + 1 :]
    yield from (b"", good[:5], good[: len(good) // 2], good[:-1], good + b"x", good + good)


def test_a_file_that_has_changed_or_is_missing_is_found_and_nothing_is_restored(folder):
    objects = {"a": np.zeros(100), "b": np.zeros(3, bool)}
    checkpoint = mpistrat.Checkpoint(w=objects)
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for bad in changed(good):
            path.write_bytes(bad)
            with pytest.raises(CheckpointError, match=path.name):
                files.verify(folder)
            with pytest.raises(CheckpointError, match=path.name):
                checkpoint.restore(folder)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name} does not exist"):
            files.verify(folder)
        path.write_bytes(good)
    assert not any(array.any() for array in objects.values())
    assert files.verify(folder).num_bytes == 803


def test_files_are_readable_as_those_of_the_program_and_by_the_library_with_checksums_of_zlib(folder, tmp_path):
    (tmp_path / "mine").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "mine").stat().st_mode}
    found = load_file(folder / "arrays-00000.safetensors")
    assert {name: (array.dtype, array.sum()) for name, array in found.items()} == {"w/a": ("f8", 4950), "w/b": ("?", 3)}
    [pieces] = files.read_manifest(folder).pieces.values()
    assert {piece.name: piece.checksum for piece in pieces} == {name: crc32(each) for name, each in found.items()}


def test_the_program_gets_the_core_between_parts_of_a_checksum_but_not_for_ever(monkeypatch):
    data, yielded, parts = np.arange(3 << 20).view(np.uint8)[: (3 << 18) + 5], [], []
    monkeypatch.setattr(files.os, "sched_yield", lambda: yielded.append(1))
    monkeypatch.setattr(files, "crc32", lambda part, before: parts.append(len(part)) or crc32(part, before))
    assert [files.checksum_meanwhile(data, ends) for ends in (inf, 0)] == [crc32(data)] * 2
    assert (len(yielded), parts) == (4, [1 << 18] * 3 + [5, len(data)])


def test_a_manifest_of_a_newer_version_or_with_addresses_of_objects_is_refused(folder):
    path = folder / files.MANIFEST
    found = json.loads(path.read_text())
    found["content"]["arrays"]["w/a"][0] = "O"
    path.write_text(json.dumps(found | {"checksum": crc32(json.dumps(found["content"]).encode())}))
    with pytest.raises(CheckpointError, match="an array of objects is in no checkpoint"):
        files.read_manifest(folder)
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(CheckpointError, match="has format 3, and this version of mpistrat reads format 2"):
        files.read_manifest(folder)


@pytest.mark.parametrize("begin", [0, 1])
def test_memory_is_written_whether_or_not_a_disk_can_read_it_by_itself(tmp_path, begin):
    memory = np.random.default_rng(0).bytes(3 * files.ALIGNMENT)
    aligned = np.frombuffer(mmap.mmap(-1, 4 * files.ALIGNMENT), np.uint8)[begin : begin + len(memory)]
    aligned[:] = np.frombuffer(memory, np.uint8)
    files.write_file(tmp_path / "file", aligned, len(memory) - 7)
    assert (tmp_path / "file").read_bytes() == memory[:-7]
