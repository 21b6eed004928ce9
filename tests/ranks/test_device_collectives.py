"""Collectives of arrays on GPUs, on a stand-in device whose streams dawdle; the host path is the oracle."""

import re
import time
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest

from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.reductions import Reductions
from mpistrat.device.cuda import address
from mpistrat.device.kernels import TYPES
from mpistrat.errors import (
    AgreementError,
    DeadlineExceededError,
    InvalidArgumentError,
    TransportError,
    UnavailableError,
    UnsupportedDtypeError,
)
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import HALF_DTYPES, ReduceOp, accumulation_dtype
from mpistrat.testing.transport_suite import operations
from mpistrat.tools import bench
from mpistrat.topology.world import World
from mpistrat.transports.nccl_bindings import nccl_refusal
from tests.gpu.bound import Pair, stand_in, values
from tests.launches import needs_ranks, on_ranks, up_to_ranks
from tests.ranks.cases import on_thread

pytestmark = on_ranks(1, 2, 4)

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def pair(make_pair, world):
    return make_pair(world)


@pytest.fixture
def mapped(make_pair, world):
    """Give collectives that find no NCCL."""
    return make_pair(world, has_nccl=False)


@pytest.fixture
def uneven(comm, make_pair):
    """Give collectives on two uneven nodes, for what does not depend on the shape."""
    return make_pair(f"{comm.size - 1}+1" if comm.size > 1 else "1x1")


@pytest.mark.ranks(nodes=["1x1", "1x2", "3+1"])
@pytest.mark.parametrize("ways", ["nccl auto", "nccl nccl", "cuda_ipc auto", "staged auto"])
def test_every_operation_on_every_dtype(make_pair, world, ways):
    transport, between = ways.split()
    if world.num_shards == 1 and transport != "nccl":
        pytest.skip("nothing is combined inside nodes")
    if between == "nccl" and (world.num_nodes == 1 or transport != "nccl"):
        pytest.skip("NCCL does not join all ranks")
    pair = make_pair(world, INTRA_TRANSPORT=transport, INTER_TRANSPORT=between)
    assert pair.gpu.hierarchy.intra.size == 1 or transport in pair.gpu.path
    for op in ReduceOp:
        arrays = [
            values(shape, dtype, pair.rank, op) * np.array(pair.size if op is MEAN else 1).astype(dtype)
            for dtype in TYPES
            if op in operations(dtype)
            for shape in ((5, 3), (0,), (), (257,))
        ]
        pair.compare(op, arrays)


@pytest.mark.ranks(nodes=["1x2", "3+1"])
@pytest.mark.parametrize("between", ["nccl", "auto"])
@pytest.mark.parametrize("algorithm", ["flat", "hierarchical"])
def test_every_algorithm_in_many_chunks_and_packs_again_and_again(make_pair, world, between, algorithm):
    """Also where one rank waits for each kernel and the others for none: all must give them to their GPUs in one order."""
    options = CommunicationOptions(algorithm=algorithm)
    pair = make_pair(world, INTER_TRANSPORT=between, CHUNK_BYTES="4096", STRICT="0")
    for turn in range(4):
        pair.gpu.timeline.enabled = turn > 1 and pair.rank == turn
        pair.compare(SUM, [values(9000, np.float32, 5 * turn + pair.rank), values(77, BF16, turn)], options)
        pair.compare(MEAN, [values(500, np.int32, turn + pair.rank)], options)
        pair.compare(SUM, [values(300, np.float32, turn)])  # on the communicator of all ranks, in turn with the others
        arrays = [values(shape, np.float32, pair.rank + shape) for shape in (10, 2000, 3, 700)]
        for num_packs, bytes_per_pack in ((None, 0), (0, 0), (2, 0), (3, 0), (None, 1024)):
            cut = CommunicationOptions(bytes_per_pack, num_packs=num_packs, algorithm=algorithm)
            pair.compare(SUM, arrays, cut)
    assert between == "auto" or not pair.gpu.hierarchy.call.unconfirmed, "all ranks have compared their calls before"


def test_arrays_in_host_memory_are_combined_there_and_out_must_lie_where_the_array_does(pair):
    array = values(100, np.float32, pair.rank)
    expected = pair.host.all_reduce(SUM, [array])[0]
    for _ in range(3):
        # what is known of an array in host memory does not serve one like it on the GPU
        for call in (pair.gpu.all_reduce, lambda *given: pair.gpu.start_all_reduce(*given).wait()) * 2:
            found = call(SUM, [array])[0]
            assert type(found) is np.ndarray
            np.testing.assert_array_equal(found, expected)
        pair.check(pair.reduce(SUM, [array])[0], expected)
    array = values(10, np.float32, pair.rank)
    for pair.gpu.is_strict in (True, False, False):  # at last a short way is known
        pair.gpu.all_reduce(SUM, [array])
        with pytest.raises(InvalidArgumentError, match="the array is on a GPU, out in host memory"):
            pair.gpu.all_reduce(SUM, [pair.up(array)], out=[array])
        with pytest.raises(InvalidArgumentError, match="the array is in host memory, out on a GPU"):
            pair.gpu.all_reduce(SUM, [array], out=[pair.up(array)])
        with pytest.raises(InvalidArgumentError, match="the array is in host memory, out on a GPU"):
            pair.gpu.all_reduce(SUM, [array, array], out=[pair.up(array), pair.up(array)])


def test_arrays_of_another_gpu_are_refused(pair):
    near, far, gpu = pair.up(np.ones(3)), on_thread(pair.up, np.ones(3)), pair.gpu  # a thread begins on another GPU
    gpu.is_strict = False  # else there is no fast path
    for _ in range(2):  # the second call of each kind is known
        assert pair.download(gpu.all_reduce(SUM, near)).tolist() == [pair.size] * 3
        assert gpu.all_reduce(SUM, near, out=near) is near
        near = pair.up(np.ones(3))
    sums = [lambda given=given: gpu.all_reduce(SUM, *given) for given in ((far,), (near, None, far), ([near, far],))]
    others = [lambda: gpu.start_all_reduce(SUM, far), lambda: gpu.reduce_scatter(SUM, far)]
    for call in (*sums, *others, lambda: gpu.all_gather(far), lambda: gpu.broadcast(far)):
        index = pair.device.index
        with pytest.raises(InvalidArgumentError, match=f"is on GPU {1 - index}, this replica computes on GPU {index}"):
            call()
    assert pair.download(gpu.all_reduce(SUM, near)).tolist() == [pair.size] * 3


@pytest.mark.parametrize("are_alike", [False, True])
def test_calls_on_different_streams_follow_each_other(make_pair, world, monkeypatch, are_alike):
    if are_alike:  # each thread has a default stream of its own, and all of them have one pointer
        monkeypatch.setattr("tests.gpu.stand_in._Stream.pointer", 2)
    pair = make_pair(INTRA_TRANSPORT="staged") if are_alike else make_pair(world)
    gpu, device = pair.gpu, pair.device
    arrays = [values(1000, np.float32, 10 * turn + pair.rank) for turn in range(4)]
    given = [pair.up(array) for array in arrays]
    # the copy out of the first is held back, while the others come round to the same memory
    with device.activate(device.stream()):
        found = gpu.all_reduce(SUM, given[:1])
        first = device.current_stream()
        copies = pair.hold(first, 0.05)
    with device.activate(device.stream()):
        found += [gpu.all_reduce(SUM, [one])[0] for one in given[1:]]
        copies.join()
        device.current_stream().wait(first.record())
        pair.check(found, pair.host.all_reduce(SUM, arrays))


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_in_the_order_of_the_replicas_bits_are_those_of_the_host(comm, make_pair, world, transport):
    if world.num_shards == 1 and transport != "nccl":
        pytest.skip("nothing is combined inside nodes")
    options, random = CommunicationOptions(deterministic=True), np.random.default_rng(comm.rank)
    arrays = [
        random.standard_normal(count).astype(dtype)
        for dtype in (np.float32, np.float64, BF16, np.complex64, np.int16)
        for count in (3001, 1)
    ]
    real = [array for array in arrays if array.dtype.kind != "c"]  # NumPy divides complex numbers by a reciprocal
    pair = make_pair(world, INTRA_TRANSPORT=transport, CHUNK_BYTES="4096")
    for op in (SUM, MEAN, ReduceOp.PROD):
        for _ in range(2):
            pair.compare(op, real if op is MEAN else arrays, options)
    floats = str(pair.gpu.explain(list(map(pair.up, arrays[:2])), options))
    is_inside = world.num_nodes == 1 < pair.size  # several nodes are staged through host memory
    assert ("intra all_reduce" in floats) == is_inside


def test_values_are_cast_between_nodes_by_the_gpu(pair, world, monkeypatch):
    asked, pinned = [0], pair.device.pinned
    # but for the tables of kernels
    monkeypatch.setattr(pair.device, "pinned", lambda nbytes: asked.append(nbytes * (nbytes > 1000)) or pinned(nbytes))
    options = CommunicationOptions(wire_dtype="bfloat16", algorithm="hierarchical")
    for _ in range(2):
        pair.compare(SUM, [values(5000, np.float32, pair.rank)], options)  # which are exact in bfloat16
    assert world.num_nodes == 1 or 0 < sum(asked) <= 2 * 2 * 5004, "two bytes of each element, in two slots of scratch memory"
    # what comes out of a single rank of each node is rounded once, and the sum once more
    narrow = [np.random.default_rng(pair.rank).standard_normal(1000).astype(np.float32)]
    if world.num_shards == 1:
        pair.compare(SUM, narrow, options)


@pytest.mark.parametrize("mpi_gpu", ["on", "off"])
def test_an_mpi_that_takes_device_memory_is_used(make_pair, world, mpi_gpu):
    """It can read the stand-in's."""
    pair, is_direct = make_pair(world, MPI_GPU=mpi_gpu), mpi_gpu == "on" and world.num_nodes > 1
    for _ in range(2):
        pair.compare(SUM, [values(shape, np.float32, pair.rank) for shape in ((5, 3), (70_000,))])
    assert ("cuda_aware between nodes" in pair.gpu.path) == is_direct


def test_what_goes_by_way_of_the_host_is_said_once(comm, world, monkeypatch, tmp_path, said):
    """Nobody's MPI takes memory of GPUs here, and says so."""
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("mpistrat.logger._warned", set())
    with stand_in(comm):
        for _ in range(2):
            communicator = Communicator(Hierarchy(comm, world))
            communicator.close()
    is_said = world.num_nodes > 1 and comm.rank == 0
    assert said.getvalue().count("GPU memory is staged through host memory between nodes: ") == is_said
    if world.num_nodes > 1:
        assert "staged over mpi_ring between nodes (" in communicator.path


@pytest.mark.ranks(nodes=["2x1", "2x2", "3+1"])
@pytest.mark.parametrize(
    ("transport", "mpi_gpu", "told"),
    [
        ("auto", "on", "planted: wrong values, and MPISTRAT_MPI_GPU=on was set"),
        ("auto", "on", "planted: rail 0 is late"),
        ("cuda_aware", "on", "INTER_TRANSPORT=cuda_aware cannot move memory of GPUs here: planted: wrong values"),
        ("cuda_aware", "off", "INTER_TRANSPORT=cuda_aware cannot move memory of GPUs here: MPISTRAT_MPI_GPU=off"),
    ],
)
def test_an_mpi_that_was_named_and_fails_is_raised_on_all(comm, world, monkeypatch, transport, mpi_gpu, told):
    monkeypatch.setenv("MPISTRAT_INTER_TRANSPORT", transport)
    monkeypatch.setenv("MPISTRAT_MPI_GPU", mpi_gpu)

    def first_exchange(rail):
        if "late" in told and rail.group.name == "rail 0":
            raise TransportError("planted: rail 0 is late")
        return "planted: wrong values" if "wrong" in told and comm.rank == comm.size - 1 else ""

    monkeypatch.setattr("mpistrat.transports.cuda_aware.CudaAwareTransport.first_exchange", first_exchange)
    hierarchy = Hierarchy(comm, world)
    with stand_in(comm), pytest.raises(TransportError, match=told):
        Communicator(hierarchy)


def test_rails_that_keep_no_channels_apart(make_pair, world):
    options = CommunicationOptions(algorithm="hierarchical")
    pair = make_pair(world, INTER_TRANSPORT="mpi", CHUNK_BYTES="4096")
    assert ("staged over mpi between nodes" in pair.gpu.path) == (world.num_nodes > 1)
    for turn in range(3):
        pair.compare(SUM, [values(9000, np.float32, turn + pair.rank)], options)


def test_nccl_may_be_asked_for_where_it_is(uneven):
    options = CommunicationOptions(implementation="nccl")
    uneven.check(uneven.reduce(SUM, [np.ones(10, np.float32)], options)[0], np.full(10, uneven.size, np.float32))
    assert uneven.gpu.all_reduce(SUM, np.array(1.5), options) == 1.5 * uneven.size  # it does not apply to host memory
    with pytest.raises(TransportError, match=r"NCCL was asked for, but NCCL does not combine float32 by MAX"):
        uneven.reduce(ReduceOp.MAX, [values(10, np.float32, 0)], options)


@needs_ranks(2)
def test_nccl_is_refused_where_a_node_has_none(make_pair):
    pair = make_pair(has_nccl=False)
    assert re.match(r"cuda_ipc inside nodes \(nccl: CuPy finds no libnccl.so.2", pair.gpu.path)
    with pytest.raises(TransportError, match="NCCL was asked for, but node0 uses cuda_ipc .*implementation AUTO"):
        pair.reduce(SUM, [values(10, np.float32, 0)], CommunicationOptions(implementation="nccl"))


@needs_ranks(2)
@pytest.mark.parametrize("act", ["allocate", "probe"])
def test_a_transport_that_one_rank_cannot_make_nobody_takes(comm, monkeypatch, act):
    world = World.from_shape(f"1x{comm.size}")
    with stand_in(comm) as device:
        allocate, failed = device.allocate, []

        def fail_once(nbytes, *_):
            if comm.rank == 1 and not failed:
                failed.append(nbytes)
                raise RuntimeError("planted: an error of CUDA's")
            return allocate(nbytes)

        if act == "allocate":
            monkeypatch.setattr(device, "allocate", fail_once)
        elif comm.rank == 1:
            monkeypatch.setattr("mpistrat.transports.nccl.find_binding", partial(fail_once, 0))
        with Communicator(Hierarchy(comm, world)) as communicator:
            told = r"cuda_ipc inside nodes \(nccl: (rank 1 failed for all: )?RuntimeError: planted"
            assert re.match(told, communicator.path)


@needs_ranks(2)
@pytest.mark.parametrize("has_nccl", [True, False])
def test_ranks_of_which_one_gets_no_stream_raise_together(comm, monkeypatch, has_nccl):
    hierarchy = Hierarchy(comm, World.from_shape(f"1x{comm.size}"))
    message = "here: node0: nccl: .*; cuda_ipc: intra node0: rank 1 failed for all: RuntimeError: planted: no stream; staged: R"
    with stand_in(comm, has_nccl=has_nccl) as device:
        if comm.rank == 1:
            monkeypatch.setattr(device, "stream", Mock(side_effect=RuntimeError("planted: no stream")))
        with pytest.raises(TransportError, match=message):
            Communicator(hierarchy)


ON_GPUS = "={} cannot move memory of GPUs here: node0: {}.*Accepted are auto"


@needs_ranks(2)
@pytest.mark.parametrize(
    ("named", "on_gpus", "message"),
    [
        ("nccl", True, ON_GPUS.format("nccl", "nccl: CuPy finds no libnccl")),
        ("shared_memory", True, ON_GPUS.format("shared_memory", "shared_memory moves memory of the host")),
        ("nccl", False, "=nccl moves GPU memory, and ranks compute on CPUs; accepted are auto"),
    ],
)
def test_a_transport_that_is_named_and_does_not_serve_is_refused_on_all(comm, monkeypatch, named, on_gpus, message):
    monkeypatch.setenv("MPISTRAT_INTRA_TRANSPORT", named)
    hierarchy = Hierarchy(comm, World.from_shape(f"1x{comm.size}"))
    with stand_in(comm, has_nccl=False) if on_gpus else nullcontext(), pytest.raises(TransportError, match=message):
        Communicator(hierarchy)


@needs_ranks(2)
def test_ranks_that_pass_arrays_of_different_memory_are_told(pair, monkeypatch):
    assert pair.gpu.is_strict
    array = values(10, np.float32, 0)
    with pytest.raises(AgreementError, match=r"float32 \(10,\) on a GPU"):
        pair.gpu.all_reduce(SUM, [array if pair.rank else pair.up(array)])


@needs_ranks(2)
def test_a_gpu_without_memory_is_an_error_on_all_ranks(uneven):
    uneven.compare(SUM, [values(10, np.float32, 0)])
    before = uneven.device.most_bytes
    if uneven.rank == 0:
        uneven.device.most_bytes = 1 << 20
    large = uneven.up(values(250_000, np.float32, 0))
    with pytest.raises(TransportError, match=r"planted: no \d+ bytes are left|another node has too little memory"):
        uneven.gpu.all_reduce(SUM, [large])
    uneven.device.most_bytes = before
    # nothing is out of step
    uneven.compare(SUM, [values(10, np.float32, 0), values(250_000, np.float32, 0)])


@needs_ranks(2)
def test_no_mapped_memory_is_kept_when_its_owner_frees_it(mapped):
    mapped.compare(SUM, [values(10, np.float32, 0)])
    arenas = [weakref.ref(arena) for arena in getattr(mapped.gpu._gpu.executor.intra, "_arenas", [])]
    mapped.compare(SUM, [values(100_000, np.float32, 0)])
    if mapped.gpu.hierarchy.intra.size > 1:
        assert arenas
        assert not any(arena() for arena in arenas)


@pytest.mark.parametrize("counts", [[7], [100_003], [1 << 18, 1 << 18]], ids=["one", "one of some size", "two large ones"])
def test_nccl_works_on_the_arrays_themselves(comm, make_pair, counts):
    pair = make_pair()
    given = [values(count, np.float32, seed + comm.rank) for seed, count in enumerate(counts)]
    arrays = [pair.up(array) for array in given]
    for op in (SUM, MEAN, ReduceOp.PROD):
        expected = pair.host.all_reduce(op, given)
        for out in (None, [pair.up(np.zeros_like(array)) for array in given]):
            for _ in range(2):  # the second time past the checks
                pair.check(pair.gpu.all_reduce(op, arrays, out=out), expected)
    pair.check(arrays, given)
    if pair.size > 1:
        assert pair.gpu.memory_report().device_bytes == 0
    assert pair.gpu.all_reduce(SUM, arrays, out=arrays)[0] is arrays[0]
    pair.check(arrays, pair.host.all_reduce(SUM, given))


@up_to_ranks(1)
def test_a_rank_alone_captures_copies(make_pair):
    pair = make_pair()
    (given, out), stream = (pair.up(np.arange(5.0) + more) for more in (0, 9)), pair.device.current_stream()
    with pair.gpu.capture(), stream.capturing() as graph:
        pair.gpu.all_reduce(ReduceOp.MEAN, [given], out=[out])
        pair.gpu.all_reduce(ReduceOp.SUM, given, out=given)
    for work in graph:
        stream.put(work)
    pair.check([given, out], [np.arange(5.0)] * 2)


@needs_ranks(2)
def test_min_max_and_prod_of_what_nccl_has_are_its_own(make_pair):
    """Of one array, which is not copied; NCCL has no int16, and its minimum and maximum of floats pass NaN over."""
    whole = {np.dtype(code) for code in "?bBiIlL"}
    own = {ReduceOp.MIN: whole, ReduceOp.MAX: whole, ReduceOp.PROD: whole | {np.dtype("f"), np.dtype("d")}}
    pair = make_pair()
    for op, dtypes in own.items():
        for dtype in filter(dtypes.__contains__, TYPES):
            array = values(257, dtype, pair.rank, op)
            expected = pair.host.all_reduce(op, [array])
            for is_in_place in (False, True):
                given, calls = [pair.up(array)], pair.library.calls.copy()
                found = pair.gpu.all_reduce(op, given, out=given if is_in_place else None)
                assert pair.library.calls - calls == {"allReduce": 1}, f"{op} of {dtype}"
                pair.check(found, expected)
    assert pair.gpu.memory_report().device_bytes == 0
    for op, dtype in ((op, dtype) for op in own for dtype in TYPES if op in operations(dtype) and dtype not in own[op]):
        refused = op is not ReduceOp.PROD or dtype not in HALF_DTYPES  # which are multiplied in float32
        assert bool(nccl_refusal(accumulation_dtype(op, dtype), op)) == refused
        calls = pair.library.calls.copy()
        pair.compare(op, [values(257, dtype, pair.rank, op)])
        by_host = refused and dtype.kind == "c"  # NumPy rounds a product of complex numbers twice
        assert (pair.library.calls == calls) == by_host, f"{op} of {dtype}"
        assert (pair.library.calls["send"] > calls["send"]) == (refused and not by_host), f"{op} of {dtype}"


@up_to_ranks(2)
@pytest.mark.parametrize("count", [30, 300_000])
@pytest.mark.parametrize("others", [0, 3], ids=["alone", "beside others"])
def test_arrays_with_gaps_between_their_elements(comm, make_pair, world, count, others):
    pair = make_pair(world)
    whole = values(2 * count, np.float32, comm.rank)
    small = [values(7, np.float32, comm.rank + seed) for seed in range(others)]
    expected = pair.host.all_reduce(SUM, [whole[:count], *small])
    gaps = pair.up(np.repeat(whole[:count], 3))[::3]
    for given in (pair.up(whole[:count].copy()), gaps, pair.up(whole[:count].reshape(2, -1).T.copy()).T.reshape(-1)):
        pair.check(pair.gpu.all_reduce(SUM, [given, *map(pair.up, small)]), expected)


def test_what_is_held_and_done_is_told(pair, monkeypatch):
    asked, pinned = [0], pair.device.pinned
    monkeypatch.setattr(pair.device, "pinned", lambda nbytes: asked.append(nbytes) or pinned(nbytes))
    arrays = [pair.up(values(25_000, np.float32, seed)) for seed in range(2)] + [pair.up(values((), np.float64, 0))]
    pair.gpu.all_reduce(SUM, arrays)
    pair.gpu.all_reduce(SUM, values((), np.float64, 0))
    report = pair.gpu.memory_report()
    assert report.device_bytes >= 200_000
    assert report.num_plans == 2
    assert (report.pinned_bytes > 0) == (pair.world.num_nodes > 1)
    assert report.pinned_bytes <= sum(asked), "what rails hold is counted once"
    assert "GPU " in str(report)
    explained = pair.gpu.explain(arrays)
    assert [pack.dtype for pack in explained.packs] == ["float32", "float64"]
    if pair.world.size > 1:
        assert pair.gpu.path in str(explained)
    assert "predicted" not in str(explained), "nobody has measured times on GPUs"


@needs_ranks(2)
def test_arrays_of_both_memories_are_refused_in_one_call(pair):
    there, here = pair.up(values(10, np.float32, 0)), values(10, np.float32, 0)
    pair.gpu.all_reduce(SUM, [there, there])
    pair.gpu.all_reduce(SUM, [here, here])
    for arrays in ([there, here], [here, there]):
        with pytest.raises(InvalidArgumentError, match=r"arrays of a call lie in one memory; got (GPU, host|host, GPU)"):
            pair.gpu.all_reduce(SUM, arrays)
        with pytest.raises(InvalidArgumentError, match="lie in one memory"):
            pair.gpu.start_all_reduce(SUM, arrays)
    pair.gpu.barrier()


@needs_ranks(2)
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_deadline_ends_a_collective_on_gpus_on_all_ranks(comm, make_pair, monkeypatch, num_nodes):
    pair = make_pair(f"1x{comm.size}" if num_nodes == 1 else f"{comm.size - 1}+1")
    late = pair.size - 1
    given = pair.up(values(3000, np.float32, pair.rank))
    options = CommunicationOptions(timeout_seconds=0.3, algorithm="hierarchical")  # MPI's own all-reduce has no deadline
    pair.gpu.all_reduce(SUM, [given], CommunicationOptions(timeout_seconds=60, algorithm="hierarchical"))  # makes the plan
    if pair.rank == late:  # it has come, and then goes no further
        monkeypatch.setattr("mpistrat.execution.program.Program.steps", lambda *_: repeat(False))
    comm.Barrier()
    # on a busy machine a rank may come after the others have given it up
    with pytest.raises(DeadlineExceededError, match=r"did not end within 0\.3 s|was given up by rank|comes too late"):
        pair.gpu.all_reduce(SUM, [given], options)
    comm.Barrier()
    with pytest.raises(UnavailableError):
        pair.gpu.all_reduce(SUM, [given])
    assert pair.rank == late or pair.library is None or pair.library.aborted == len(pair.library.communicators)


@on_ranks(2)
def test_arrays_on_gpus_are_measured(uneven):
    row = bench.measure(uneven.gpu, 1024, "auto")
    assert row.seconds > 0
    assert row.rounds > 0
    assert bench.measure(uneven.gpu, 1024, "mpi").plan == "mpi"
    assert uneven.gpu.path in bench.place_text(uneven.gpu)


def test_two_communicators_on_a_gpu_work_in_the_order_of_the_program(uneven, monkeypatch):
    """Kernels of two NCCL communicators that began in another order on another rank would wait for each other for ever."""
    carry_out, ended = Reductions._carry_out, []

    def late(self, *given):
        time.sleep(0.2)
        result = carry_out(self, *given)
        ended.append("started")
        return result

    monkeypatch.setattr(Reductions, "_carry_out", late)
    with Communicator(Hierarchy(uneven.comm, uneven.world)) as other:
        other.is_strict = False
        values = uneven.up(np.ones(5))
        for _ in range(3):  # the first call looks at all, and later ones go by its plan
            ended.clear()
            work = uneven.gpu.start_all_reduce(SUM, [values])
            other.all_reduce(SUM, [values])
            ended.append("called")
            assert ended == ["started", "called"]
            uneven.check(work.wait(), [np.full(5, float(uneven.size))])


@pytest.mark.ranks(nodes=["1x2", "2x2"])
def test_collectives_by_nccl4py_give_what_they_give_on_the_host_and_say_by_what(comm, world, monkeypatch):
    monkeypatch.setenv("MPISTRAT_INTER_TRANSPORT", "nccl")
    between = "" if comm.size == 2 else ", nccl by nccl4py between nodes"
    many = [values(1000, np.float32, comm.rank), values((3, 5), np.int64, comm.rank), values(7, np.float16, comm.rank)]
    with Pair(comm, world, nccl_by="nccl4py") as pair:
        assert pair.gpu.path == f"nccl by nccl4py inside nodes{between}"
        for options in (CommunicationOptions(), CommunicationOptions(deterministic=True)):
            for arrays in (many, many[:1], many[:1]):
                pair.compare(SUM, arrays, options)


@pytest.mark.ranks(nodes=["2x2"])
@pytest.mark.parametrize("is_direct", [True, False])
def test_what_mpi_is_to_send_lies_in_no_window(comm, world, monkeypatch, is_direct):
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "on" if is_direct else "off")
    with Pair(comm, world, nccl_by="nccl4py") as pair:
        assert ("cuda_aware between nodes" in pair.gpu.path) == is_direct
        pair.compare(SUM, [values(3000, np.float32, pair.rank)], CommunicationOptions(algorithm="hierarchical"))
        windows = pair.nccl._nccl._calls.windows
        assert len(windows) == (0 if is_direct else 1)
    assert not windows


@pytest.fixture
def windowed(comm, world, monkeypatch):
    """Give collectives by nccl4py, which joins all ranks."""
    monkeypatch.setenv("MPISTRAT_INTER_TRANSPORT", "nccl")
    with Pair(comm, world, nccl_by="nccl4py") as pair:
        yield pair


@pytest.mark.ranks(nodes=["1x2", "2x2"])
def test_memory_of_empty_lies_in_a_window_and_is_freed_when_no_rank_has_an_array_on_it(windowed):
    calls, rank, given = windowed.library._calls, windowed.rank, values((30, 5), np.float32, windowed.rank)
    before = len(calls.windows)
    for _ in range(4):
        array = windowed.gpu.empty((30, 5), np.float32)
        array[...] = windowed.up(given)
        windowed.check(windowed.gpu.all_reduce(SUM, array, out=array), windowed.host.all_reduce(SUM, given))
        assert address(array) in {window.start for window in calls.windows[before:]}
        assert len(calls.windows) <= before + 2, "that of the turn before is still there, and no more"
    del array
    kept = [windowed.gpu.empty(100 + rank_of, BF16) for rank_of in range(windowed.size + 1)]
    kept = kept[rank : rank + 1]
    last = windowed.gpu.empty([7], int)
    assert len(calls.windows) == before + windowed.size + 1, "each rank has another array, and the last one"
    assert (kept[0].shape, kept[0].dtype, last.shape) == ((100 + rank,), BF16, (7,))
    kept.clear()
    windowed.gpu.empty((), bool)
    assert len(calls.windows) == len(calls.memory) == before + 2


@pytest.mark.ranks(nodes="1x2")
def test_memory_of_empty_is_freed_after_what_uses_it(windowed):
    given, target = values(1000, np.float32, windowed.rank), windowed.up(np.zeros(1000, np.float32))
    array, other = windowed.gpu.empty(1000, np.float32), windowed.device.stream()
    array[...] = windowed.up(given)
    windowed.device.synchronize()
    release = windowed.hold(other, 0.1)
    with windowed.device.activate(other):
        target[...] = array
    del array
    windowed.gpu.empty(10, np.float32)
    release.join()
    windowed.check(target, given)


@pytest.mark.ranks(nodes="1x2")
def test_an_array_of_empty_outlives_its_communicator(windowed):
    calls, given = windowed.library._calls, values(1000, np.float32, windowed.rank)
    array = windowed.gpu.empty(1000, np.float32)
    array[...] = windowed.up(given)
    windowed.gpu.all_reduce(SUM, [array[:5], array[5:9]])  # in a bucket
    view = array[10:]
    del array
    windowed.gpu.close()
    assert (len(calls.windows), len(calls.memory)) == (0, 1), "only the array of the program is left"
    windowed.check(view, given[10:])
    del view
    assert not calls.memory


@pytest.mark.ranks(nodes="1x2")
def test_an_array_for_which_one_rank_has_no_memory_is_refused_on_all(windowed, mapped):
    is_last = windowed.rank == windowed.size - 1
    most, windowed.device.most_bytes = windowed.device.most_bytes, 100 if is_last else 1000
    with pytest.raises(TransportError, match="rank 1: planted: no 400 bytes"):
        windowed.gpu.empty(100, np.float32)
    windowed.device.most_bytes = most
    with pytest.MonkeyPatch.context() as patch:
        if is_last:
            patch.setattr(mapped.device.array_module, "empty", Mock(side_effect=MemoryError("planted")))
        with pytest.raises(TransportError, match=r"rank 1: no memory for an array of 400 B \(planted\)"):
            mapped.gpu.empty(100, np.float32)
    for pair in (windowed, mapped):
        with pytest.raises(AgreementError, match=r"empty\(\(1,\), float32\)"):
            pair.gpu.empty(1 + pair.rank, np.float32)


def test_what_empty_cannot_make_is_refused(pair):
    for call, error in (
        (lambda to: to.empty((2, -1), np.float32), InvalidArgumentError),
        (lambda to: to.empty(2, object), UnsupportedDtypeError),
        (lambda to: to.empty(2.5, int), TypeError),
    ):
        for communicator in (pair.gpu, pair.host):
            with pytest.raises(error):
                call(communicator)
    with pair.device.current_stream().capturing(), pytest.raises(InvalidArgumentError, match="call empty before"):
        pair.gpu.empty(2, int)
    for shape in (3, (2, 0), ()):
        made = pair.gpu.empty(shape, BF16), pair.host.empty(shape, BF16)
        assert [type(array) for array in made] == [pair.device.array_module.ndarray, np.ndarray]
        assert {array.shape for array in made} == {shape if type(shape) is tuple else (shape,)}
