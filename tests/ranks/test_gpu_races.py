"""Consecutive calls on several streams, without a wait on the host: no two pieces of work on the same memory are unordered."""

import numpy as np
import pytest

from mpistrat.execution.device_executor import DeviceExecutor
from tests.gpu.pair import values
from tests.gpu.races import Races
from tests.gpu.stand_in import _Stream

TURNS = 6
COUNTS = (4099, 128, 64)

pytestmark = [
    pytest.mark.ranks(nodes=["1x2", "2x2"]),
    pytest.mark.parametrize("between", ["auto", "nccl"]),
    pytest.mark.parametrize("algorithm", ["flat", "hierarchical"]),
]


@pytest.fixture
def pair(make_pair, world, algorithm, between):
    return make_pair(world, STRICT="0", CHUNK_BYTES="4096", ALGORITHM=algorithm, INTER_TRANSPORT=between)


def run(pair, monkeypatch, breaks=None):
    """Make calls of many kinds on two streams; return the races, and the results with their streams and what they should be."""
    gpu, host, device, size = pair.gpu, pair.host, pair.device, pair.size
    found, streams, results = Races(monkeypatch, device).found, [device.stream(), device.stream()], []
    if breaks is not None:
        breaks(device)
    for turn in range(TURNS):
        arrays = [values((count,), np.float32, turn + pair.rank) for count in COUNTS]
        rows = values((4 * size, 2), np.float32, turn + pair.rank)
        with device.activate(streams[turn % 2]):
            many, one = [put_late(device, array) for array in arrays], put_late(device, rows)
            made = (
                (gpu.all_reduce("sum", many), host.all_reduce("sum", arrays)),
                (gpu.start_all_reduce("mean", many).wait(), host.all_reduce("mean", arrays)),
                ([gpu.start_reduce_scatter("sum", one).wait()], [host.reduce_scatter("sum", rows)]),
                ([gpu.start_all_gather(one, 1).wait()], [host.all_gather(rows, 1)]),
                (gpu.all_reduce("sum", many, out=many), host.all_reduce("sum", arrays)),
            )
        results += [(streams[turn % 2], *each) for each in made]
    device.synchronize()
    return found, results


def put_late(device, array):
    made = device.array_module.empty(array.shape, array.dtype)
    device.put(made._memory, array)
    return made


def test_consecutive_calls_are_ordered(pair, monkeypatch):
    found, results = run(pair, monkeypatch)
    for stream, some, expected in results:
        with pair.device.activate(stream):
            pair.check(some, expected)
    assert not found


def test_a_copy_that_does_not_follow_earlier_ones_is_found(pair, monkeypatch):
    found, _ = run(pair, monkeypatch, lambda _: monkeypatch.setattr(DeviceExecutor, "_follow", lambda self: None))
    assert any(pair.comm.allgather(bool(found)))


def test_a_stream_of_the_program_that_waits_for_nothing_is_found(pair, monkeypatch):
    def breaks(device):
        wait = _Stream.wait
        monkeypatch.setattr(_Stream, "wait", lambda self, event: self is device.current_stream() or wait(self, event))

    found, _ = run(pair, monkeypatch, breaks)
    assert any(pair.comm.allgather(bool(found)))
