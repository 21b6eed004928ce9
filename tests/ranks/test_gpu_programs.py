"""The programs that the evidence of a GPU starts, on the stand-in: whole strategies and calls, on arrays of device memory."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.topology.world import World
from tests.gpu import conformance, graphs, host_time, interop, null_device, sanitizer, soak, streams, torch_backward, verbs_rank
from tests.gpu.bound import stand_in
from tests.gpu.stand_in import UNFINISHED
from tests.launches import on_ranks, up_to_ranks
from tests.other_arrays import installed
from tests.reference import of_verb

DELAY_TURNS = 400


@on_ranks(2)
def test_the_kit_runs_where_a_transport_does_not_decline(comm, monkeypatch):
    monkeypatch.setattr(conformance.SUBJECTS["cuda_ipc"], "probe", lambda group: "planted" * (group.rank == 1))
    with stand_in(comm):
        assert conformance.main("staged", "2x1")["checks"] > 800
        assert conformance.main("cuda_ipc", "1x2") == {"skipped": "planted"}


@contextmanager
def on_nodes(comm, shape, monkeypatch):
    """Give a strategy on stand-in devices of these virtual nodes, and the device."""
    monkeypatch.setenv("MPISTRAT_ALLOW_SHARED_GPU", "1")
    monkeypatch.setenv("MPISTRAT_CHUNK_BYTES", "4KiB")
    with stand_in(comm, nodes=shape) as device:
        strategy = mpistrat.MultiWorkerMirroredStrategy()
        yield strategy, device
        strategy.close()


@up_to_ranks(1)
def test_a_wrong_sum_is_told(monkeypatch):
    wrong = lambda verb, rows, place, rank, op: (of_verb(verb, rows, place, rank, op)[0] + (op == "MEAN"), None)  # noqa: E731
    monkeypatch.setattr(verbs_rank, "of_verb", wrong)
    strategy = mpistrat.OneDeviceStrategy("cpu:0")
    with pytest.raises(AssertionError, match=r"all_reduce\(mean, float32\), call 0: got float32 \(\), and not what NumPy"):
        strategy.run(verbs_rank._try_all, args=(strategy,))


@on_ranks(2)
def test_calls_are_compared_with_those_of_a_binding(comm):
    with stand_in(comm) as device:
        communicator = mpistrat.Communicator(Hierarchy(comm, World.from_shape("1x2")))
        with host_time.raw_nccl(comm, communicator._gpu.executor.intra._nccl) as raw:
            figures = host_time.overhead(communicator, device, raw, {"4KiB": 4096}, rounds=2)
        assert figures.keys() == {*(f"{way}_us_4KiB" for way in ("nccl", "call", "out")), "ratio_4KiB", "ratio_out_4KiB"}
        assert min(figures.values()) > 0
        with pytest.raises(AssertionError, match="nccl of 1024 elements of float32"):
            host_time.overhead(communicator, device, lambda *_: None, {"4KiB": 4096}, rounds=1)
        communicator.close()


@up_to_ranks(1)
def test_every_kernel_at_odd_offsets(comm):
    with stand_in(comm) as device:
        assert sanitizer.try_all(device) > 600


def delay(stream):
    left = iter(range(DELAY_TURNS))
    stream.put(lambda: UNFINISHED if next(left, None) is not None else None)


@pytest.mark.ranks(nodes=["1x2", "2x2"])
@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_arrays_are_read_when_they_are_written_and_their_memory_is_given_to_others_afterwards(comm, transport, monkeypatch):
    monkeypatch.setenv("MPISTRAT_INTRA_TRANSPORT", transport)
    monkeypatch.setenv("MPISTRAT_ALGORITHM", "hierarchical")
    with on_nodes(comm, "1x2" if comm.size == 2 else "2x2", monkeypatch) as (strategy, device):
        communicator = strategy.extended.communicator
        found = streams.check(communicator, device, delay, device.synchronize, 4099)
        assert found["right"] == 2 * len(streams.CASES) * streams.TURNS
        assert found["reused"] > 0
        monkeypatch.setattr(streams, "without", lambda *_: nullcontext())
        monkeypatch.setattr(streams, "_without_wait", lambda *_: nullcontext())
        monkeypatch.setattr(streams, "CASES", {"all_reduce": streams.CASES["all_reduce"]})
        with pytest.raises(AssertionError, match="the delay proves nothing"):
            streams.check(communicator, device, delay, device.synchronize, 64)


class Graphs:
    """What captures on the stand-in: nothing may be put on the stream meanwhile, and what came before has its values."""

    def __init__(self, device, is_right=True):
        self._device, self._is_right = device, is_right

    def make(self, values):
        return self._device.array_module.asarray(values)

    def read(self, array):
        return array.get()

    def capture(self, act):
        with self._device.activate(self._device.stream()), self._device.current_stream().capturing() as work:
            act()
        return self._is_right and not work

    def graph(self, act):
        stream = self._device.current_stream()
        with stream.capturing() as work:
            act()
        return lambda: [stream.put(each) for each in work]


@on_ranks(2)
@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_captures_beside_collectives_and_of_collectives(comm, transport, monkeypatch):
    monkeypatch.setenv("MPISTRAT_INTRA_TRANSPORT", transport)
    monkeypatch.setattr(graphs, "HELD_SECONDS", 0)
    with on_nodes(comm, "1x2", monkeypatch) as (strategy, device):
        replayed = {"it_replayed": graphs.REPLAYS} if transport == "nccl" else {}
        assert graphs.check(strategy, {"it": Graphs(device)}, 5000, 4) == {"it_captured": 4, "it_refused": 2, **replayed}
        with pytest.raises(AssertionError, match="4 of 4 captures of it beside collectives failed: it computed wrong values"):
            graphs.check(strategy, {"it": Graphs(device, is_right=False)}, 5000, 4)


@on_ranks(4)
def test_every_verb_on_device_arrays_and_a_soak_finds_what_grows(comm, monkeypatch):
    monkeypatch.setattr(verbs_rank, "SHAPES", verbs_rank.SMALL_SHAPES)
    monkeypatch.setattr(verbs_rank, "DTYPES", ("float32", "int16", ml_dtypes.bfloat16))
    held = iter([{"device_mib": 10.0}, {"device_mib": 12.5}])
    with on_nodes(comm, "2x2", monkeypatch) as (strategy, _):
        assert "staged" in strategy.communicator.path
        figures = soak.soak(strategy, 2, 1, lambda barrier: next(held))
    assert figures["device_mib_growth"] == 2.5
    assert figures["compared"] > 2 * 200


@on_ranks(2)
def test_strategies_are_opened_and_closed(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_ALLOW_SHARED_GPU", "1")
    held = iter([{"threads": 3, "files": 7}, {"threads": 5, "files": 7}])
    with stand_in(comm):
        figures = soak.open_and_close(6, 3, (1 << 10, 1 << 14), lambda barrier: next(held))
    assert figures == {"rounds": 6, "threads_growth": 2, "files_growth": 0}


@on_ranks(2)
def test_every_call_takes_arrays_of_cupy_itself(comm, monkeypatch):
    """On a device that does nothing, so that nothing is known of results: the stand-in's arrays may take what CuPy's do not."""
    pytest.importorskip("cupy")
    monkeypatch.setenv("MPISTRAT_ALLOW_SHARED_GPU", "1")
    with null_device.bound(comm.size) as device:
        found = host_time.of_calls(comm, device, 5)
    assert found["path"] == "nccl inside nodes"
    assert {"reduce_scatter", "context.all_reduce, 161 arrays"} <= found.keys()


@on_ranks(2)
@pytest.mark.parametrize("library", interop.KINDS)
def test_arrays_of_other_libraries_in_memory_of_the_host(comm, library, monkeypatch):
    monkeypatch.setattr(verbs_rank, "SHAPES", verbs_rank.SMALL_SHAPES)
    kind = interop.KINDS[library]("cpu")
    if kind.missing():
        pytest.skip(kind.missing())
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    assert interop.check(strategy, kind)["compared"] > 300
    monkeypatch.setattr(kind, "read", lambda array: np.asarray(interop.KINDS[library].read(kind, array) + 1))
    with pytest.raises(AssertionError, match=r"\d{3} of the cases failed:\nall_reduce\(sum, float32\): AssertionError"):
        interop.check(strategy, kind)
    strategy.close()


@on_ranks(2)
def test_gradients_that_pytorch_computes_on_another_thread(comm, monkeypatch):
    installed("torch")

    monkeypatch.setattr(torch_backward, "OPTIONS", mpistrat.experimental.CommunicationOptions(bytes_per_pack=1024))
    with mpistrat.Communicator(comm) as communicator, ThreadPoolExecutor(1) as thread:

        def train(steps):
            backward = lambda loss: thread.submit(loss.backward).result()  # noqa: E731
            return torch_backward.train(communicator, "cpu", backward, width=24, steps=steps)

        figures = torch_backward.right(*train(20))
        assert figures["hooks_elsewhere"] == figures["steps"] == 20
        assert figures["largest_difference"] < torch_backward.TOLERANCE / 10
        monkeypatch.setattr("mpistrat.torch.average_gradients", lambda *_, **__: nullcontext())
        with pytest.raises(AssertionError, match=r"differ from those of the whole batch in 2 steps: step 0 by"):
            torch_backward.right(*train(2))
        monkeypatch.setattr(torch_backward, "OPTIONS", mpistrat.experimental.CommunicationOptions(bytes_per_pack=1 << 20))
        with pytest.raises(AssertionError, match="1 buckets"):
            train(2)
