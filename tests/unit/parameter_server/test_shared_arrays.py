"""Arrays in shared memory under a sequence lock: what another process reads is whole, and nothing of it is left behind."""

import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpistrat.parameter_server.shared_arrays import SharedArrays, attach
from tests.processes import until

SERVER = """
import pickle, sys
import numpy as np
from mpistrat.parameter_server.shared_arrays import SharedArrays

shared = SharedArrays(1)
array, lock, address = shared.allocate((int(sys.argv[1]),), np.dtype("f8"))
array[:] = 0
sys.stdout.buffer.write(pickle.dumps(address))
sys.stdout.buffer.flush()
while True:
    with lock:
        array += 1
"""


@pytest.fixture
def writer():
    """Start a process that adds 1 to an array again and again, and give the array as this one reads it."""
    started = []

    def start(size):
        process = subprocess.Popen([sys.executable, "-c", SERVER, str(size)], stdout=subprocess.PIPE)
        started.append(process)
        return process, attach(pickle.load(process.stdout), 1)

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("size", [1, 100, 20_000])
def test_a_copy_is_whole_while_the_array_is_changed(writer, size):
    _, array = writer(size)
    target, seen, refused = np.empty(size), set(), 0
    ends = time.monotonic() + 0.5
    while time.monotonic() < ends:
        if array.read(0, target):
            assert (target == target[0]).all(), "half a change was read"
            seen.add(target[0])
        else:
            refused += 1
    assert len(seen) + refused > 1, "the array did not change"


def test_rows_are_whole_while_the_array_is_changed(writer):
    _, array = writer(4000)
    target, rows = np.empty((1000, 2)), np.random.default_rng(0).integers(0, 2000, 1000)
    ends = time.monotonic() + 0.3
    while time.monotonic() < ends:
        if array.take(rows, target):
            assert (target == target[0, 0]).all(), "half a change was read"


def test_what_a_killed_server_shared_is_gone(writer):
    before = set(Path("/dev/shm").iterdir())
    process, array = writer(1000)
    assert until(lambda: array.read(0, np.empty(1000)), 20)
    assert any("memfd:mpistrat" in str(one.readlink()) for one in Path(f"/proc/{process.pid}/fd").iterdir())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if str(process.pid) in path.name]
    array.read(0, np.empty(1000))  # it is mapped here still, and harms nobody


def test_while_a_change_is_under_way_nothing_is_read():
    shared = SharedArrays(1)
    array, lock, address = shared.allocate((3, 2), np.dtype("f4"))
    array[:] = np.arange(6).reshape(3, 2)
    attached, target = attach(address, 1), np.zeros((2, 2), "f4")
    assert attached.read(1, target)
    np.testing.assert_array_equal(target, array[1:])
    with lock:
        assert not attached.read(1, target)
        assert not attached.take(np.array([0]), target[:1])
    assert attached.take(np.array([2, 0]), target)
    np.testing.assert_array_equal(target, array[[2, 0]])
    assert lock.version == 1
    shared.done[0] = 7
    assert attached.done[0] == 7


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 0)])
def test_arrays_of_any_shape(shape):
    array, _, address = SharedArrays(3).allocate(shape, np.dtype("i4"))
    array[...] = 5
    target = np.empty_like(array)
    assert attach(address, 3).read(0, target)
    np.testing.assert_array_equal(target, array)


def test_what_is_not_the_memory_of_the_server_is_not_read(tmp_path):
    _, _, address = (shared := SharedArrays(1)).allocate((3,), np.dtype("f4"))
    assert attach(address, 1) is not None
    assert attach(address._replace(inode=address.inode + 1), 1) is None
    assert attach(address._replace(path=str(tmp_path / "none")), 1) is None
    del shared


def test_where_memory_cannot_be_shared_arrays_are_private(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    array, lock, address = SharedArrays(2).allocate((4,), np.dtype("f8"))
    with lock:
        array[:] = 1
    assert (address, lock.version) == (None, 1)
