"""Consecutive calls on several streams, without a wait on the host: no two pieces of work on the same memory are unordered.

Streams and the host have clocks: of each stream, how much of its work comes before. An event carries the clock of its stream to
whoever waits for it. Two pieces of work are a race if they use the same memory, one of them writes there, and neither comes
before the other. What the host reads and writes, and what kernels do that add and divide, is not looked at.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpistrat.device.kernels import TYPES
from mpistrat.execution.device_executor import DeviceExecutor
from tests.gpu.bound import values
from tests.gpu.stand_in import StandInDevice, _Event, _Stream
from tests.gpu.stand_in_nccl import _Communicator

TURNS = 6

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
        arrays = [values((count,), np.float32, turn + pair.rank) for count in (4099, 128, 64)]
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


Clock = dict[_Stream, int]
Ranges = Sequence[tuple[int, int]]
"""Addresses, and bytes from there on."""

_BYTES = {name: dtype.itemsize for dtype, name in TYPES.items()}
_WHOLE = ("reduceScatter",), ("allGather",)  # whose memory that is read, or written, has a part for each rank


class _Work(NamedTuple):
    stream: _Stream
    number: int
    before: Clock
    what: str


class Races:
    """The races that are `found` in what a device is given from now on."""

    def __init__(self, patch: pytest.MonkeyPatch, device: StandInDevice) -> None:
        self.found: set[str] = set()
        self._device, self._host = device, Clock()
        self._clocks: dict[_Stream, Clock] = {}
        self._used: list[tuple[_Work, Ranges, Ranges]] = []
        copy, clear, launch, record, wait = _Stream.copy, _Stream.clear, _Stream.launch, _Stream.record, _Stream.wait
        done = _Event.done

        def copying(stream: _Stream, target: int, source: int, nbytes: int) -> None:
            self._use(self._next(stream, "copy"), [(source, nbytes)], [(target, nbytes)])
            copy(stream, target, source, nbytes)

        def clearing(stream: _Stream, target: int, nbytes: int) -> None:
            self._use(self._next(stream, "clear"), [], [(target, nbytes)])
            clear(stream, target, nbytes)

        def launching(stream: _Stream, kernel: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
            work = self._next(stream, kernel)
            launch(stream, kernel, num_blocks, arguments)
            if kernel.startswith("move_segments"):
                stream.put(lambda: self._move(work, *map(int, arguments)))  # its table is there now

        def recording(stream: _Stream, event: _Event | None = None) -> _Event:
            recorded = record(stream, event)
            recorded.clock = dict(self._clock(stream))
            return recorded

        def waiting(stream: _Stream, event: _Event) -> None:
            _merge(self._clock(stream), event.clock)
            wait(stream, event)

        def asking(event: _Event) -> bool:
            is_done = done(event)
            _merge(self._host, event.clock if is_done else {})
            return is_done

        for name, method in (("copy", copying), ("clear", clearing), ("launch", launching), ("record", recording)):
            patch.setattr(_Stream, name, method)
        patch.setattr(_Stream, "wait", waiting)
        patch.setattr(_Event, "done", asking)
        for verb in ("allReduce", "reduceScatter", "allGather", "broadcast"):
            patch.setattr(_Communicator, verb, self._nccl(verb, getattr(_Communicator, verb)))

    def _nccl(self, verb: str, call: Any) -> Any:
        def calling(comm: _Communicator, send: int, receive: int, count: int, kind: Any, *more: Any) -> None:
            read, written = (count * kind.itemsize * (comm.comm.size if verb in whole else 1) for whole in _WHOLE)
            self._use(self._next(self._device.streams[more[-1]], verb), [(send, read)], [(receive, written)])
            call(comm, send, receive, count, kind, *more)

        return calling

    def _clock(self, stream: _Stream) -> Clock:
        clock = self._clocks.setdefault(stream, {})
        _merge(clock, self._host)
        return clock

    def _next(self, stream: _Stream, what: str) -> _Work:
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return _Work(stream, clock[stream], dict(clock), what)

    def _move(self, work: _Work, table: int, first_tile: int, count: int, _: int) -> None:
        source, target = (_BYTES[name] for name in work.what.partition("<")[2].removesuffix(">").split(", "))
        rows = np.array((ctypes.c_uint64 * (3 * count)).from_address(table)).reshape(-1, 3).tolist()
        reads = [(start, elements * source) for start, _, elements in rows]
        self._use(work, [(table, first_tile - table + 4 * count), *reads], [(to, each * target) for _, to, each in rows])

    def _use(self, work: _Work, reads: Ranges, writes: Ranges) -> None:
        for other, read, written in self._used:
            is_ordered = work.before.get(other.stream, 0) >= other.number or other.before.get(work.stream, 0) >= work.number
            if not is_ordered and (_meet(writes, read) or _meet(writes, written) or _meet(reads, written)):
                names = sorted(f"{each.what} on stream {each.stream.pointer}" for each in (work, other))
                self.found.add(" and ".join(names))
        self._used.append((work, reads, writes))


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _meet(some: Ranges, others: Ranges) -> bool:
    return any(a < b + m and b < a + n for a, n in some for b, m in others)
