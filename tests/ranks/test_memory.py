"""What a strategy holds to communicate: how much, that it is told, and that repeated calls ask for no more."""

import resource
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.execution.compile import SLOT_ALIGNMENT_BYTES
from mpistrat.transports.ring import RECEIVES_AHEAD, SEGMENT_BYTES
from mpistrat.transports.shared_memory import exchange_bytes
from mpistrat.transports.window import NodeWindow
from tests.launches import needs_ranks, up_to_ranks

SUM = mpistrat.ReduceOp.SUM
CHANNELS = 4  # a slot more than chunks under way


def reduce(ops, sizes, **options):
    arrays = [np.full(size, ops.rank, np.float32) for size in sizes]
    return ops.all_reduce(SUM, arrays, CommunicationOptions(**options), out=arrays)


@up_to_ranks(4)
def test_the_workspace_is_at_most_twice_the_largest_pack(ops, world):
    algorithms = ["auto", "hierarchical"]
    for size in (1000, 700_000, 1_500_000, 300_000):
        for algorithm in algorithms:
            reduce(ops, [size, 1], algorithm=algorithm)
            reduce(ops, [size], algorithm=algorithm)
    report = ops.memory_report()
    assert report.largest_pack_bytes == 4 * 1_500_001
    assert report.window_bytes <= max(2 * report.largest_pack_bytes, exchange_bytes(2)) + CHANNELS * SLOT_ALIGNMENT_BYTES
    # plans of one channel share where segments land
    rails = len(world.shards_of(ops.rank)) if world.num_nodes > 1 else 0
    assert report.rail_bytes <= rails * CHANNELS * RECEIVES_AHEAD * SEGMENT_BYTES
    assert report.plan_bytes == 0
    assert report.rank == ops.rank


@needs_ranks(2)
def test_small_arrays_need_little_shared_memory_and_what_plans_hold_is_told(ops, world):
    reduce(ops, [50_000], deterministic=True)
    report = ops.memory_report()
    # beyond the node what arrives is kept until it can be added in order; inside it all is read where it lies
    assert (report.plan_bytes > 0) == (world.num_nodes > 1)
    assert report.num_plans == 1
    reduce(ops, [50_000, 1], algorithm="hierarchical")
    assert ops.memory_report().window_bytes < 2 << 20


@up_to_ranks(4)
@pytest.mark.parametrize("algorithm", ["auto", "hierarchical"])
def test_repeated_calls_allocate_nothing(ops, world, algorithm):
    arrays = [np.full(size, ops.rank, np.float32) for size in (400_000, 5)]
    options = CommunicationOptions(algorithm=algorithm)
    for _ in range(3):
        ops.all_reduce(SUM, arrays, options, out=arrays)
        ops.start_all_reduce(SUM, arrays, options, out=arrays).wait()
    before = ops.memory_report()
    tracemalloc.start()
    try:
        for _ in range(3):
            ops.all_reduce(SUM, arrays, options, out=arrays)
            ops.start_all_reduce(SUM, arrays, options, out=arrays).wait()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 200_000, "generators, requests and views, but no buffer of 1.6 MB or part of one"
    assert ops.memory_report() == before


@pytest.mark.ranks(nodes=["1x2"])
def test_large_results_lie_in_memory_of_earlier_ones(ops, world):
    whole, part = np.ones(9 << 20, np.float32), np.ones(9 << 19, np.float32)
    calls = [
        lambda: ops.all_reduce(SUM, whole),
        lambda: ops.all_reduce(SUM, [whole, part])[0],
        lambda: ops.all_reduce(SUM, whole, CommunicationOptions(deterministic=True)),
        lambda: ops.start_all_reduce(SUM, whole).wait(),
        lambda: ops.all_gather(part),
        lambda: ops.broadcast(whole),
    ]
    for call in calls * 2:
        call()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for call in calls:
        call()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 18 * len(calls), "a page fault for each 2 MiB at least"


def test_a_strategy_tells_what_it_holds(strategy):
    report = strategy.memory_report()
    assert isinstance(report, mpistrat.MemoryReport)
    assert str(report).startswith(f"rank {report.rank} holds ")
    strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", {"a": np.ones(300_000), "b": np.ones(3)}))
    later = strategy.memory_report()
    assert later.largest_pack_bytes == 8 * 300_003
    assert later.total_bytes >= report.total_bytes


@needs_ranks(2)
def test_where_more_memory_is_refused_what_went_before_goes_on(make_ops, monkeypatch):
    ops = make_ops(STRICT="0")
    arrays = [np.arange(50_000, dtype=np.float32) + ops.rank]
    mixed = [np.ones(100, np.float32), np.ones(10, np.float16)]
    expected = ops.all_reduce(SUM, arrays)[0], ops.all_reduce(SUM, mixed)[1]
    check, most_bytes = NodeWindow._check_space, ops.memory_report().window_bytes

    def little(transport, nbytes):
        if nbytes > most_bytes:
            raise mpistrat.errors.TransportError("planted: no more shared memory")
        check(transport, nbytes)

    monkeypatch.setattr(NodeWindow, "_check_space", little)
    large = [np.ones(1 << 22, np.float32), np.ones(10, np.float16)]
    for found, given in zip(ops.all_reduce(SUM, large, CommunicationOptions(algorithm="hierarchical")), large, strict=True):
        assert (found == given * ops.size).all()  # the node goes on over MPI
    for _ in range(2):
        assert (ops.all_reduce(SUM, arrays)[0] == expected[0]).all()
        assert (ops.all_reduce(SUM, mixed)[1] == expected[1]).all()


@needs_ranks(2)
def test_where_mpi_cannot_allocate_shared_memory_on_one_rank_all_go_on(comm, make_ops, monkeypatch, said):
    monkeypatch.setattr("mpistrat.logger._warned", set())
    window = MPI.Win

    def fail_on_one(nbytes, unit, info, group):
        made = window.Allocate_shared(nbytes, unit, info, group)
        if group.rank == group.size - 1:
            raise MPI.Exception(MPI.ERR_NO_MEM)
        return made

    monkeypatch.setattr(MPI, "Win", SimpleNamespace(Allocate_shared=fail_on_one))
    ops = make_ops()
    monkeypatch.setattr(MPI, "Win", window)
    for count in (10, 100_000):
        assert (ops.all_reduce(SUM, np.ones(count)) == comm.size).all()
    assert said.getvalue().count("go on over mpi, which is slower") == (comm.rank == 0)
