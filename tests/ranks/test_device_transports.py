"""Transports of device memory, on a stand-in device whose streams dawdle."""

import io
import os
import threading
from contextlib import nullcontext
from functools import partial, reduce
from itertools import repeat
from unittest.mock import Mock, patch

import numpy as np
import pytest

from mpistrat.device.binding import bind
from mpistrat.errors import DeadlineExceededError, TransportError
from mpistrat.groups import group as groups
from mpistrat.logger import StderrHandler, logger
from mpistrat.reduction import Fold, ReduceOp
from mpistrat.steps import WAITING, drive
from mpistrat.testing.transport_suite import check_transport
from mpistrat.transports import cuda_aware, nccl, nccl_bindings
from mpistrat.transports.cuda_aware import CudaAwareTransport
from mpistrat.transports.cuda_ipc import CudaIpcTransport
from mpistrat.transports.nccl import NcclTransport
from mpistrat.transports.ring import BoundRing
from mpistrat.transports.staged import StagedTransport
from tests.gpu import on_host, stand_in_nccl
from tests.gpu.bound import TRIAL_BYTES, all_kernels
from tests.gpu.fake_nccl4py import bound_by
from tests.gpu.stand_in import StandInDevice
from tests.gpu.stand_in_nccl import StandInNccl, _Communicator
from tests.launches import needs_ranks, up_to_ranks
from tests.processes import until

pytestmark = up_to_ranks(3)

CHUNK_BYTES = {"many chunks": 4096, "one chunk": 1 << 22}


@pytest.fixture
def device(comm, monkeypatch):
    monkeypatch.setattr(nccl, "TRIAL_BYTES", TRIAL_BYTES)
    monkeypatch.setattr(stand_in_nccl, "ABORT_SECONDS", 0.2)
    device = StandInDevice(comm.rank)
    yield device
    device.close()


@pytest.fixture(params=nccl_bindings.BINDINGS)
def binding(request, monkeypatch):
    monkeypatch.setattr(nccl_bindings, "GRACE_SECONDS", 0.0)
    return request.param


@pytest.fixture
def kernels(comm):
    """Give the sums that the conformance kit asks for."""
    if on_host.missing():
        pytest.skip(on_host.missing())
    return all_kernels(comm)


@pytest.mark.parametrize("chunks", CHUNK_BYTES)
def test_staged_passes_the_kit(group, device, chunks):
    make = partial(StagedTransport, device=device, chunk_bytes=CHUNK_BYTES[chunks])
    assert check_transport(make, group, between_nodes=True) > 300


def test_a_copy_that_is_given_up_keeps_its_memory(group, device):
    transport = StagedTransport(group, device)
    buffer = transport.allocate(64).view(np.float32)
    operation = transport.all_reduce(buffer, ReduceOp.SUM)
    device.held, before = transport._down, len(groups._kept)
    with pytest.raises(DeadlineExceededError, match="a sum did not end"):
        drive(operation.run(), lambda: "a sum", 0.05)
    [(array, slots)] = groups._kept[before:]
    assert array is buffer
    assert slots is transport._slots[0], "a copy of the GPU writes to pinned memory that nobody else may get"
    device.held = None


class _Available(NcclTransport):
    @classmethod
    def probe(cls, group):
        return ""  # the class asks CuPy, of which this machine may have none


def test_nccl_passes_the_kit(group, device, comm, binding):
    library = bound_by(StandInNccl(device, comm), binding)
    assert check_transport(partial(_Available, device=device, library=library), group) > 300


def test_what_nccl_cannot_combine_is_refused_and_says_what_can(group, device, comm):
    transport = NcclTransport(group, device, StandInNccl(device, comm))
    for dtype, op in ((np.int16, ReduceOp.SUM), (np.float32, ReduceOp.MAX), (np.complex64, ReduceOp.PROD)):
        buffer = transport.allocate(64).view(dtype)
        with pytest.raises(TransportError, match="cuda_ipc can") as raised:
            transport.all_reduce(buffer, op)
        assert transport.refusal(np.dtype(dtype), op) in str(raised.value)
    transport.close()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_communicator_of_nccl_is_destroyed_once_and_by_its_owner(group, device, comm, binding, is_aborted):
    library = StandInNccl(device, comm)
    transport = NcclTransport(group, device, bound_by(library, binding))
    if is_aborted:
        transport.abort("planted")
    transport.close()
    assert library.destroyed == 0
    transport.dispose()
    assert (library.destroyed, library.aborted) == ((0, 1) if is_aborted else (1, 0))
    with pytest.raises(TransportError, match="NCCL has failed: (planted|it was closed)"):
        next(transport.all_reduce(device.allocate(64).view(np.float32), ReduceOp.SUM).run())


@pytest.fixture
def windows(device, comm):
    """Give nccl4py's calls, which count windows, and a binding that makes them."""
    library = bound_by(StandInNccl(device, comm), "nccl4py")
    return library._calls, library


def test_a_communicator_whose_calls_a_graph_has_is_destroyed_when_that_is_gone(group, device, comm, binding, monkeypatch):
    monkeypatch.setattr(nccl, "DESTROY_SECONDS", 0.1)
    library, is_gone, said = StandInNccl(device, comm), threading.Event(), io.StringIO()
    transport = NcclTransport(group, device, bound_by(library, binding))
    memory = device.allocate(64).view(np.float32)
    with device.current_stream().capturing():
        transport.capture([memory], [memory], Fold(ReduceOp.SUM, memory.dtype, 1))
    destroy = _Communicator.destroy
    monkeypatch.setattr(_Communicator, "destroy", lambda self: (is_gone.wait(20.0), destroy(self)))
    monkeypatch.setattr(logger, "handlers", [StderrHandler(said)])
    transport.dispose()
    assert "world: NCCL's communicator keeps its memory until the CUDA graphs" in said.getvalue()
    assert not library.destroyed
    is_gone.set()
    assert until(lambda: library.destroyed == 1, 10.0)
    comm.Barrier()


def test_memory_of_nccl4py_lies_in_windows_until_it_is_given_back(group, device, windows):
    calls, library = windows
    transport = NcclTransport(group, device, library)
    assert (transport.has_windows, calls.registered, calls.windows) == (True, 1, []), "the first sums were in a window too"
    assert "NCCL_RUNTIME_CONNECT" not in os.environ, "what NCCL is told as it joins is not told to jobs of this process"
    for _ in range(2):
        buffer = transport.allocate(400).view(np.float32)
        assert [window.start for window in calls.windows] == [buffer.ctypes.data]
        device.put(buffer, np.full(100, group.rank, np.float32))
        drive(transport.all_reduce(buffer, ReduceOp.SUM).run(), lambda: "a sum", 60.0)
        assert (device.get(buffer) == sum(range(group.size))).all()
        del buffer
        assert len(calls.memory) == 1, "memory of a window is kept"
        transport.close()
        assert (calls.windows, calls.memory) == ([], {})
    transport.allocate(400)
    transport.dispose()
    assert (calls.windows, calls.memory) == ([], {})
    aborted = NcclTransport(group, device, library)
    aborted.allocate(400)
    aborted.abort("planted")
    aborted.dispose()
    assert len(calls.windows) == 1, "those of a communicator that was aborted are left alone"


@pytest.mark.parametrize("lacks", ["windows", "an error", "on one rank", "switched off on one rank"])
def test_without_windows_memory_is_that_of_cuda_and_none_waits_for_one(group, device, windows, monkeypatch, lacks):
    calls, library = windows
    monkeypatch.setenv("NCCL_WIN_ENABLE", "0" if lacks.startswith("switched") and group.rank == 0 else "1")
    calls.has_windows = lacks != "windows"
    if lacks == "an error" or (lacks == "on one rank" and group.rank == 0):
        calls.problem = "planted: unhandled system error"
    transport = NcclTransport(group, device, library)
    assert not transport.has_windows
    assert not calls.windows
    assert not (lacks.startswith("switched") and calls.registered)
    transport.allocate(400)
    assert not calls.memory
    transport.dispose()


def test_a_window_for_which_a_rank_has_no_memory_is_refused_on_all(group, device, windows):
    calls, library = windows
    transport = NcclTransport(group, device, library)
    device.most_bytes = 100 if group.rank == group.size - 1 else device.most_bytes
    with pytest.raises(TransportError, match=f"rank {group.size - 1}: planted: no 400 bytes"):
        transport.allocate(400)
    calls.problem = "planted: no address space"
    told = "registers no window of 50 bytes: planted: no address space; NCCL_WIN_ENABLE=0"
    with pytest.raises(TransportError, match=told):
        transport.allocate(50)
    assert not calls.windows
    calls.problem = ""
    assert transport.allocate(50).nbytes == 50
    transport.dispose()


@needs_ranks(2)
@pytest.mark.parametrize("problem", ["", "planted: no address space"])
def test_what_one_rank_cannot_register_is_in_a_window_on_none(group, device, windows, problem):
    calls, library = windows
    transport = NcclTransport(group, device, library)
    kept = transport.allocate(400)
    if group.rank == 0:
        calls.has_windows, calls.problem = False, problem
    refused = pytest.raises(TransportError, match=f"rank 0: NCCL registers no window of 50 bytes: {problem}")
    with refused if problem else nullcontext():
        assert transport.allocate(50).nbytes == 50
    assert [window.start for window in calls.windows] == [kept.ctypes.data]
    transport.dispose()


@pytest.mark.parametrize(("version", "ended"), [(23007, ["revoked", "aborted"]), (22703, ["aborted"]), (23007, ["aborted"])])
def test_kernels_end_before_nccl_frees_what_those_of_peers_may_use(group, device, comm, monkeypatch, version, ended):
    library = bound_by(StandInNccl(device, comm, version), "nccl4py")
    transport = NcclTransport(group, device, library)
    if len(ended) == 1:  # of a new one, that has failed
        monkeypatch.setattr(library._calls, "comm_revoke", Mock(side_effect=library._calls.NCCLError("planted")))
    transport.abort("planted")
    assert until(lambda: library._calls.library.aborted, 10.0)
    assert library._calls.ended == ended


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("NcclCommunicator", RuntimeError(), r"NCCL could not join ranks? 0.*: RuntimeError"),
        ("get_unique_id", RuntimeError("planted"), "world: NCCL could not begin on rank 0: planted.*SOCKET_IFNAME"),
        ("NCCL_COMM_BLOCKING", None, "NCCL_COMM_BLOCKING=0 is set"),
    ],
    ids=["an error without a word", "no network", "it does not block"],
)
def test_an_nccl_that_cannot_join_is_refused_on_all_ranks(group, device, comm, monkeypatch, binding, name, error, message):
    library = StandInNccl(device, comm)
    if error is None:
        monkeypatch.setenv(name, "0")
    else:
        setattr(library, name, Mock(side_effect=error))
    with pytest.raises(TransportError, match=message):
        NcclTransport(group, device, bound_by(library, binding))


@needs_ranks(2)
def test_a_rank_that_joins_too_late_leaves_no_kernel_on_its_gpu(group, device, comm, binding, monkeypatch):
    monkeypatch.setattr(nccl, "JOIN_SECONDS", 0.2)
    monkeypatch.setattr(stand_in_nccl, "CONNECT_SECONDS", 0.5)
    library, goes_on = StandInNccl(device, comm), threading.Event()
    if comm.rank == 0:
        join = library.NcclCommunicator
        library.NcclCommunicator = lambda *given: (join(*given), goes_on.wait(20.0))[0]
    with pytest.raises(TransportError, match="not all ranks had joined after 0.2 s"):
        NcclTransport(group, device, bound_by(library, binding))
    goes_on.set()
    assert until(lambda: library.aborted, 10.0)
    assert not (comm.rank == 0 and library.calls)
    comm.Barrier()


@pytest.mark.parametrize("is_large", [False, True])
def test_wrong_first_sums_of_nccl_are_told_to_all(group, device, comm, monkeypatch, is_large):
    """All of a sum on the last rank, or the last element of a large one on all."""
    get, library, size = device.get, StandInNccl(device, comm), comm.size
    wrong = (lambda array: np.arange(array.size) == array.size - 1) if is_large else (lambda _: comm.rank == size - 1)
    monkeypatch.setattr(device, "get", lambda array: get(array) + wrong(array))
    told = f"{size + 1} in the place of {size}" if is_large else rf"could not join ranks? {size - 1}: its first sums were wrong"
    with pytest.raises(TransportError, match=told):
        NcclTransport(group, device, library)
    assert (library.aborted, library.destroyed) == (1, 0), "no rank keeps a communicator that another one has given up"


def test_nccl_has_a_network_where_there_is_an_adapter_or_a_plugin(monkeypatch, tmp_path):
    adapters = tmp_path / "infiniband"
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    monkeypatch.setenv("NCCL_NET_PLUGIN", "")
    assert NcclTransport.network_refusal(adapters) == "there is no adapter for RDMA, and no plugin libnccl-net.so"
    (adapters / "mlx5_0").mkdir(parents=True)
    assert not NcclTransport.network_refusal(adapters)
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    monkeypatch.setenv("NCCL_NET_PLUGIN", "ofi")
    assert "libnccl-net-ofi.so" in NcclTransport.network_refusal(adapters)
    monkeypatch.setenv("NCCL_NET_PLUGIN", "libc.so.6")
    assert not NcclTransport.network_refusal(adapters)


@needs_ranks(2)
def test_mixed_versions_of_nccl_are_refused_on_all_ranks(group, device, comm, binding):
    library = bound_by(StandInNccl(device, comm, version=23203 if comm.rank else 22809), binding)
    with pytest.raises(TransportError, match=r"world: NCCL 2\.28\.9 on rank 0, 2\.32\.3 on rank"):
        NcclTransport(group, device, library)


@needs_ranks(2)
def test_a_failure_that_nccl_finds_by_itself_aborts_and_is_raised(group, device, comm, binding):
    library = StandInNccl(device, comm)
    transport = NcclTransport(group, device, bound_by(library, binding))
    operation = transport.all_reduce(transport.allocate(64).view(np.float32), ReduceOp.SUM)
    library.error = "planted: a peer's GPU fell off the bus"
    with pytest.raises(TransportError, match="world: NCCL has failed: .*planted: a peer's GPU fell off the bus"):
        for _ in operation.run():
            pass
    assert library.aborted == 1
    with pytest.raises(TransportError, match="NCCL has failed"):
        next(operation.run())
    comm.Barrier()


def test_cuda_ipc_and_cuda_aware_pass_the_kit(group, device, kernels):
    device.kernels = kernels
    assert check_transport(partial(CudaIpcTransport, device=device), group) > 300
    if group.size > 4:
        pytest.skip("a ring of four ranks is a ring of eight; its order is tested by itself")
    device.kernels = kernels
    # the largest buffers of the kit are cut into many segments, the others into one
    make = partial(CudaAwareTransport, device=device, segment_bytes=1 << 14)
    assert check_transport(make, group, between_nodes=True) > 300


def test_sums_begin_with_different_gpus(group, device, kernels):
    device.kernels = kernels
    for count, dtype in ((3, np.float64), (1003, np.float32), (5000, np.float64)):
        rows = np.random.default_rng(count).standard_normal((group.size, count)).astype(dtype)
        expected = in_the_order_of_cuda_ipc(rows)
        transport = CudaIpcTransport(group, device)
        buffer, window = transport.allocate(rows[0].nbytes).view(dtype), transport._sync_window
        with patch.object(window, "barrier", wraps=window.barrier) as barrier:
            operation = transport.all_reduce(buffer, ReduceOp.SUM)
            for _ in range(2):
                device.put(buffer, rows[group.rank])
                drive(operation.run(), lambda: "a sum", 60.0)
                found = [device.get(part.addends[0]) for part in operation.parts]
                np.testing.assert_array_equal(np.concatenate(found), expected)
                drive(transport.fence(transport.release()), lambda: "a fence", 60.0)
        assert barrier.call_count == 2 * 2
        del operation, buffer  # they hold memory of the peers, and what the peers have mapped
        transport.dispose()


def in_the_order_of_cuda_ipc(rows):
    """Add rows: what is in part k, of as many as there are rows, from row k + 1 on, and round."""
    size, (_, count) = len(rows), rows.shape
    length = -(-count * rows.itemsize // (size * 16)) * 16 // rows.itemsize  # packets of 16 bytes are not cut
    total = np.empty(count, rows.dtype)
    for part in range(size):
        span = slice(part * length, (part + 1) * length)
        total[span] = reduce(np.add, [rows[(part + 1 + turn) % size][span] for turn in range(size)])
    return total


@needs_ranks(2)
def test_mapped_memory_that_outlives_its_owner_is_found(group, device):
    transport = CudaIpcTransport(group, device)
    transport.allocate(64)
    mapped = transport._arenas[1 - group.rank] if group.rank < 2 else None
    transport.dispose()
    group.comm.Barrier()
    assert bool(device.errors) == (group.rank < 2)
    assert mapped is None or mapped.nbytes == 64
    device.errors.clear()


@needs_ranks(2)
@pytest.mark.parametrize(("verb", "limit"), [("map", 1 << 30), ("export", 1 << 30), ("allocate", 64)])
def test_memory_that_one_rank_cannot_reach_or_show_or_does_not_have_is_refused_on_all(group, device, monkeypatch, verb, limit):
    """The table of the arenas has less than 64 bytes."""
    succeed = getattr(device, verb)

    def fail(*asked):
        if getattr(asked[-1], "nbytes", asked[-1]) < limit:
            raise TransportError("planted: no memory")
        return succeed(*asked)

    if group.rank == 1:
        monkeypatch.setattr(device, verb, fail)
    with pytest.raises(TransportError, match="world: rank 1: planted: no memory"):
        CudaIpcTransport(group, device).allocate(64)


def test_zeros_of_either_sign_have_the_same_bits_on_all_ranks(group, device, kernels):
    device.kernels = kernels
    transport = CudaAwareTransport(group, device)
    buffer = transport.allocate(4 * 2**group.size).view(np.float32)
    signs = np.arange(buffer.size) >> group.rank & 1  # every order of signs over the ranks
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        device.put(buffer, np.where(signs, np.float32(-0.0), np.float32(0.0)))
        drive(transport.all_reduce(buffer, op).run(), lambda: "zeros", 60.0)
        assert len(set(group.comm.allgather(device.get(buffer).tobytes()))) == 1


def test_where_segments_land_is_held_once_for_each_channel_and_told(group, device, kernels):
    device.kernels = kernels
    transport = CudaAwareTransport(group, device)
    buffer = transport.allocate(4096).view(np.float32)
    for channel in (0, 1, 0):
        transport.all_reduce(buffer, ReduceOp.SUM, channel)
    assert transport.scratch_bytes == 2 * transport.receives_ahead * cuda_aware.SEGMENT_BYTES


@pytest.fixture
def bound(device, kernels, monkeypatch):
    """Let this process compute on the stand-in, and MPI be taken for CUDA-aware."""
    device.kernels = kernels
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "on")
    bind(device)
    yield device
    bind(None)


@needs_ranks(2)
def test_an_mpi_that_delivers_wrong_values_is_not_used_by_anybody(group, bound, monkeypatch):
    if group.rank == 1:
        elsewhere, message = np.zeros(1 << 16, np.uint8), CudaAwareTransport._message
        monkeypatch.setattr(CudaAwareTransport, "_message", lambda self, part: message(self, elsewhere[: part.nbytes]))
    assert CudaAwareTransport(group, bound).first_exchange() == "a first sum of device memory gave wrong values"


@needs_ranks(2)
def test_an_mpi_that_delivers_nothing_is_told_to_all(group, bound, monkeypatch):
    monkeypatch.setattr(cuda_aware, "_FIRST_SECONDS", 0.05)
    if group.rank == 1:
        monkeypatch.setattr(BoundRing, "run", lambda self: repeat(WAITING))
    late = r"world: rank \d: the first exchange of device memory did not end within 0.05 s; .*MPISTRAT_MPI_GPU=off goes"
    with pytest.raises(TransportError, match=late):
        CudaAwareTransport(group, bound).first_exchange()


@needs_ranks(2)
def test_a_deadline_ends_the_ring_and_leaves_its_memory_to_the_peers(group, bound, comm):
    transport = CudaAwareTransport(group, bound)
    operation = transport.all_reduce(transport.allocate(64).view(np.float32), ReduceOp.SUM)
    before = len(groups._kept)
    if comm.rank == 0:
        with pytest.raises(DeadlineExceededError, match="a sum did not end within 0.05 s"):
            drive(operation.run(), lambda: "a sum", 0.05)
        assert len(groups._kept) == before + 1
    comm.Barrier()
