"""NCCL: which binding is taken, what ranks that join see, and the thread that looks after enqueued work."""

import ctypes
import gc
import inspect
import sys
import threading
import time
import weakref
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from mpistrat.errors import DeadlineExceededError
from mpistrat.steps import drive
from mpistrat.transports import nccl, nccl_bindings, nccl_watcher
from mpistrat.transports.base import Watched
from mpistrat.transports.nccl_bindings import Nccl4py, find_binding, nccl4py_refusal
from tests.gpu.fake_nccl4py import DataType, FakeNccl4py, RedOp, UniqueId, modules
from tests.gpu.stand_in import UNFINISHED, StandInDevice
from tests.processes import python


class _Alike:
    """NCCL's communicator of ranks that all hold the same; it adds one rank after the other."""

    def __init__(self, device, size):
        self._device, self._size, self.aborted = device, size, False

    def abort(self):
        self.aborted = True

    def allReduce(self, send, receive, count, kind, *more):  # noqa: N802 - NCCL's names
        self._put(more, lambda: np.copyto(_at(receive, count, kind), sum([_at(send, count, kind)] * self._size)))

    reduce = reduceScatter = allReduce  # noqa: N815

    def broadcast(self, send, receive, *_):
        assert send == receive

    def allGather(self, send, receive, count, kind, *more):  # noqa: N802
        self._put(more, lambda: np.copyto(_at(receive, self._size, kind), _at(send, 1, kind)))

    def _put(self, more, work):
        self._device.streams[more[-1]].put(work)


def _at(address, count, kind):
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)


@pytest.mark.parametrize("size", [2, 257])  # the cube of 257 is no float32
def test_the_first_sums_are_exact_for_any_number_of_ranks(size):
    device = StandInDevice()
    comm = SimpleNamespace(allgather=lambda mine: [mine] * size, bcast=lambda mine: mine, Get_rank=lambda: 0)
    group = SimpleNamespace(name="world", rank=0, size=size, ranks=tuple(range(size)), comm=comm)
    joined = _Alike(device, size)
    library = SimpleNamespace(
        NCCL_FLOAT32=np.dtype(np.float32),
        NCCL_INT64=np.dtype(np.int64),
        NCCL_SUM=0,
        get_version=lambda: 23007,
        get_unique_id=lambda: b"",
        NcclCommunicator=lambda *_, joined=joined: joined,
    )
    transport = nccl.NcclTransport(group, device, library)
    assert not joined.aborted
    kept = weakref.ref(joined)
    library.NcclCommunicator = None
    del joined, transport
    gc.collect()
    assert kept() is not None, "collected without its peers"
    nccl._undisposed.remove(kept())
    device.close()


@pytest.fixture
def cupy(monkeypatch):
    """Let CuPy find an NCCL, and nccl4py the same."""
    cupy = SimpleNamespace(available=True, get_version=lambda: 23007)
    monkeypatch.setattr(nccl_bindings, "cupy_binding", lambda: cupy)
    monkeypatch.setitem(nccl_bindings.BINDINGS, "CuPy", lambda: cupy)
    found = modules(Mock(get_version=lambda: 23007))
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    find_binding.cache_clear()
    yield cupy
    find_binding.cache_clear()


def test_nccl4py_is_taken_unless_it_finds_another_nccl_than_cupy(cupy):
    assert not nccl4py_refusal()
    assert isinstance(find_binding(), Nccl4py)
    find_binding.cache_clear()
    cupy.get_version = lambda: 22809
    assert nccl4py_refusal() == "it finds NCCL 2.30.7, and CuPy 2.28.9"
    assert find_binding() is cupy
    find_binding.cache_clear()
    cupy.available, cupy.get_version = False, None
    assert isinstance(find_binding(), Nccl4py)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (None, "ModuleNotFoundError: "),
        (ModuleType("nccl.bindings"), "ImportError: cannot import name 'nccl'"),
        (SimpleNamespace(nccl=FakeNccl4py(Mock(get_version=Mock(side_effect=RuntimeError("no libnccl"))))), "no libnccl"),
    ],
    ids=["not installed", "another package of that name", "no libnccl"],
)
def test_cupy_is_taken_where_nccl4py_cannot_be_used(cupy, monkeypatch, module, why):
    monkeypatch.setitem(sys.modules, "nccl.bindings", module)
    monkeypatch.delitem(sys.modules, "nccl.bindings.nccl")
    assert why in nccl4py_refusal()
    assert find_binding() is cupy


def test_the_fake_of_nccl4py_has_its_names_arguments_and_numbers():
    real, fake = pytest.importorskip("nccl.bindings.nccl"), FakeNccl4py(Mock())
    for name in (name for name, call in vars(FakeNccl4py).items() if inspect.isfunction(call) and not name.startswith("_")):
        parameters = [list(inspect.signature(getattr(module, name)).parameters) for module in (real, fake)]
        assert parameters[0] == parameters[1], name
    for ours, theirs in ((DataType, real.DataType), (RedOp, real.RedOp)):
        assert {name: int(theirs[name]) for name in ours.__members__} == ours.__members__
    identifier = real.UniqueId.from_buffer(bytearray(range(128)))
    assert bytes(identifier) == bytes(UniqueId.from_buffer(bytearray(range(128)))) == bytes(range(128))
    assert issubclass(real.NCCLError, Exception)


@pytest.fixture
def device():
    device = StandInDevice()
    device.current_stream().put(lambda: UNFINISHED)
    yield device
    device.close()


def watched(tell_peers=lambda: None, seconds=0.0):
    ends = lambda: time.monotonic() + seconds if seconds else 0.0  # noqa: E731
    return Watched(lambda: False, ends, lambda: False, tell_peers, lambda: False)


def give_up(seconds):
    raise DeadlineExceededError(f"planted: {seconds:.1f} s")


def limited(made, stream, work):
    """Put work with a deadline on a stream."""
    limit = made.begin_limit(stream)
    stream.put(work)
    made.add(stream.record(), limit)


def watcher(device, check):
    made = nccl_watcher.NcclWatcher("watcher", device, check, give_up, watched())
    made.add(device.current_stream().record())
    return made


def fail():
    raise RuntimeError("planted: cudaErrorLaunchFailure")


def test_what_cuda_raises_ends_the_wait_too(device):
    made = watcher(device, fail)
    made.note_raised()
    drive(made.settle(), lambda: "the watcher", 10.0)
    made.add(device.current_stream().record())
    drive(made.settle(), lambda: "the watcher", 10.0)
    made.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_raised", [False, True])
def test_a_failure_that_the_program_does_not_see_is_raised_by_the_thread(device, monkeypatch, is_raised):
    found = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(f"{arguments.exc_value}"))
    monkeypatch.setattr(nccl_watcher, "UNSEEN_SECONDS", 30.0 if is_raised else 0.01)
    made = watcher(device, fail)
    drive(made.settle(), lambda: "the watcher", 10.0)
    if is_raised:
        made.note_raised()
        made.stop()
    made._thread.join(10.0)
    assert found == ([] if is_raised else ["planted: cudaErrorLaunchFailure"])


def test_an_abort_that_blocks_holds_nobody_up(device, monkeypatch):
    monkeypatch.setattr(nccl_watcher, "STOP_SECONDS", 0.05)
    released, entered = threading.Event(), threading.Event()

    def check():
        entered.set()
        released.wait()

    made = watcher(device, check)
    assert entered.wait(10.0)
    begun = time.monotonic()
    made.stop()
    assert time.monotonic() - begun < 5.0
    released.set()


def test_interrupts_of_the_program_leave_no_thread_waiting():
    program = """
import faulthandler
from mpistrat.transports.base import Watched
from mpistrat.transports.nccl_watcher import NcclWatcher
from tests.gpu.stand_in import StandInDevice
from tests.interrupts import interrupted

faulthandler.dump_traceback_later(20, exit=True)
device, watched = StandInDevice(), Watched(lambda: False, lambda: 0.0, lambda: False, lambda: None, lambda: False)
watcher = NcclWatcher("watcher", device, lambda: None, lambda seconds: None, watched)
count = interrupted(lambda: [watcher.note_raised() for _ in range(10**9)])
watcher.stop()
print(count > 100, watcher._thread.is_alive())
device.close()
"""
    assert python(program).stdout == "True False\n"


def test_to_settle_waits_for_the_work_and_not_for_the_thread(monkeypatch):
    monkeypatch.setattr(nccl_watcher, "CHECK_SECONDS", 60.0)
    device = StandInDevice()
    stream, ends = device.current_stream(), time.monotonic() + 0.2
    stream.put(lambda: None if time.monotonic() > ends else UNFINISHED)
    made = nccl_watcher.NcclWatcher("watcher", device, lambda: None, give_up, watched())
    event = stream.record()
    made.add(event)
    drive(made.settle(), lambda: "the watcher", 10.0)
    assert time.monotonic() > ends
    stream.put(lambda: UNFINISHED)
    made.add(stream.record(event))
    assert next(made.settle(), None) is not None, "what came after the event was recorded again has not ended"
    made.stop()
    device.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_deadline_counts_from_when_the_gpu_comes_to_the_operation(monkeypatch):
    found, told, device = [], threading.Event(), StandInDevice()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(f"{arguments.exc_value}"))
    monkeypatch.setattr(nccl_watcher, "UNSEEN_SECONDS", 0.01)
    made = nccl_watcher.NcclWatcher("watcher", device, lambda: None, give_up, watched(told.set, 0.4))
    stream = device.current_stream()

    def takes(seconds, began=[]):  # noqa: B006 - of all that follow each other
        def work():
            began.append(time.monotonic())
            return UNFINISHED if time.monotonic() < began[0] + seconds else began.clear()

        return work

    for _ in range(5):  # the host is ahead of the GPU
        limited(made, stream, takes(0.2))
    drive(made.settle(), lambda: "the watcher", 10.0)
    assert not told.is_set()
    limited(made, stream, lambda: UNFINISHED)
    made._thread.join(10.0)
    assert told.is_set()
    assert found == ["planted: 0.4 s"]
    device.close()
