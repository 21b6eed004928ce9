"""The verbs beside all_reduce on arrays of GPUs: NCCL carries them out where it joins all ranks. The streams dawdle."""

from unittest.mock import Mock

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import AgreementError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from mpistrat.groups.group import Group
from mpistrat.reduction import ReduceOp
from mpistrat.steps import drive
from mpistrat.transports import nccl
from tests.gpu import stand_in_arrays, verbs_rank
from tests.gpu.bound import TRIAL_BYTES, Pair, values
from tests.gpu.stand_in import StandInDevice
from tests.gpu.stand_in_nccl import StandInNccl
from tests.launches import needs_ranks, up_to_ranks

pytestmark = up_to_ranks(3)

SUM = ReduceOp.SUM


@pytest.fixture
def joined(world, monkeypatch):
    """Give a world whose ranks NCCL joins: one node, or several between which it is asked for."""
    monkeypatch.setenv("MPISTRAT_INTER_TRANSPORT", "nccl")
    return world


@pytest.fixture
def node(make_pair, joined):
    return make_pair(joined)


@pytest.fixture
def on_device(node, monkeypatch):
    """Give the same, and have what copies an array to the host fail, unless the test asks for it."""
    if node.size > 1:
        node.download, fail = stand_in_arrays.ndarray.get, Mock(side_effect=AssertionError("an array was copied to the host"))
        monkeypatch.setattr(stand_in_arrays.ndarray, "get", fail)
    return node


@up_to_ranks(2)
def test_arrays_of_every_dtype_are_combined_and_moved(on_device, monkeypatch):
    monkeypatch.setattr(verbs_rank, "SHAPES", verbs_rank.SMALL_SHAPES)
    strategy, put = mpistrat.Strategy(mpistrat.StrategyExtended(on_device.gpu)), on_device.up

    def step():
        for dtype in map(np.dtype, verbs_rank.DTYPES):
            for what, call, expected in verbs_rank.cases(strategy, dtype, put):
                verbs_rank.compare(what, call(), expected, on_device.download)

    strategy.run(step)


def test_a_reduce_scatter_of_equal_parts_is_one_call_of_nccl(on_device):
    pair = on_device
    array = values((5 * pair.size, 3), np.float32, pair.rank)
    whole = pair.host.all_reduce(SUM, array)
    for _ in range(2):
        before = pair.library.calls.copy() if pair.size > 1 else None
        pair.check(pair.gpu.reduce_scatter(SUM, pair.up(array)), whole[5 * pair.rank : 5 * pair.rank + 5])
        if before is not None:
            assert pair.library.calls - before == {"reduceScatter": 1}
    out = pair.up(np.empty((5, 3), np.float32))
    assert pair.gpu.reduce_scatter(SUM, pair.up(array), out=out) is out
    pair.check(out, whole[5 * pair.rank : 5 * pair.rank + 5])


@needs_ranks(2)
def test_arrays_of_which_some_are_in_host_memory_go_by_way_of_it(node):
    mine = values((3, 2), np.float32, node.rank)
    given = mine if node.rank == 0 else node.up(mine)
    calls = node.library.calls.copy()
    results = [node.gpu.all_gather(given), node.gpu.broadcast(given, 1), node.gpu.all_to_all([given] * node.size)]
    expected = [node.host.all_gather(mine), node.host.broadcast(mine, 1), node.host.all_to_all([mine] * node.size)]
    for found, wanted in zip([*results[:2], *results[2]], [*expected[:2], *expected[2]], strict=True):
        assert type(found) is (np.ndarray if node.rank == 0 else stand_in_arrays.ndarray)
        np.testing.assert_array_equal(found if node.rank == 0 else node.device.get(found), wanted)
    assert node.library.calls == calls


@needs_ranks(2)
def test_calls_that_differ_do_not_reach_nccl(comm, joined):
    first, last = comm.rank == 0, comm.size - 1
    wrong = (
        (AgreementError, lambda gpu, up: gpu.broadcast(up(np.ones(3)), 0 if first else 1)),
        (AgreementError, lambda gpu, up: gpu.all_gather(up(np.ones(3))) if first else gpu.all_to_all(up(np.ones(3)))),
        (AgreementError, lambda gpu, up: gpu.reduce_scatter(SUM if first else "max", up(np.ones(8, np.int32)))),
        (InvalidArgumentError, lambda gpu, up: gpu.all_gather(up(np.ones((2, 2 + first))))),
        (InvalidArgumentError, lambda gpu, up: gpu.gather(up(np.ones(2 + first)), last)),
        (InvalidArgumentError, lambda gpu, up: gpu.all_to_all([up(np.ones((2, 2 + first)))] * comm.size)),
    )
    for error, make in wrong:
        with Pair(comm, joined) as pair:
            calls = pair.library.calls.copy()
            with pytest.raises(error):
                make(pair.gpu, pair.up)
            assert pair.library.calls == calls
            comm.Barrier()


@needs_ranks(2)
def test_ranks_of_a_node_that_share_no_memory_meet_by_messages(comm, make_pair, monkeypatch):
    monkeypatch.setattr("mpistrat.transports.shared_memory.SharedMemoryTransport.probe", lambda group: "planted: no memory")
    pair = make_pair(STRICT="0")
    array = values((4, 3), np.float32, pair.rank)
    for _ in range(2):
        pair.compare(SUM, [array])
        pair.check(pair.gpu.all_gather(pair.up(array)), pair.host.all_gather(array))
    assert pair.gpu._gpu.executor.compares_by_messages
    calls = pair.library.calls.copy()
    with pytest.raises(AgreementError, match="ranks made different calls"):
        pair.gpu.all_reduce(SUM, pair.up(array if comm.rank else array[:2]))
    assert pair.library.calls == calls
    comm.Barrier()


@pytest.mark.ranks(nodes=["1x2", "2x1", "3+1"])
@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter"])
def test_known_calls_are_compared_before_nccl_is_called(comm, joined, monkeypatch, verb):
    """NCCL would add what the others multiply, and tell nobody."""
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    ops = SUM, ReduceOp.PROD
    for num_others in {1, comm.size - 1}:
        with Pair(comm, joined) as pair:
            array, call = pair.up(values(4 * comm.size, np.float32, comm.rank)), getattr(pair.gpu, verb)
            for op in ops * 2:
                call(op, array)
            calls = pair.library.calls.copy()
            with pytest.raises(AgreementError, match=rf"{verb}\(PROD, .*\n.*{verb}\(SUM, "):
                call(ops[comm.rank < num_others], array)
            assert pair.library.calls == calls
            comm.Barrier()


@up_to_ranks(2)
@pytest.mark.parametrize("is_strict", ["0", "1"])
def test_ranks_that_remember_different_calls_begin_anew(make_pair, joined, is_strict):
    """The rank whose array has changed remembers another last call than those whose array is the same as before."""
    pair = make_pair(joined, STRICT=is_strict)
    for turn, extent in enumerate([5, 7, 5, 5, 7, 5, 7, 7, 2, 7]):
        shape = extent if pair.rank == 0 else 3, 2
        array, wide = (values(shape, np.float32, 10 * turn + each + pair.rank) for each in (0, 5))
        pair.gpu.note(f"turn {turn}")
        moved = lambda to, put: [to.all_gather(put(array)), to.broadcast(put(wide)), to.broadcast(put(wide), pair.size - 1)]  # noqa: B023, E731
        pair.check(moved(pair.gpu, pair.up), moved(pair.host, np.copy))
        whole = pair.host.all_gather(array)
        for given in (array, whole[: len(array)]):  # the second one lies in the memory of the result, where not all have theirs
            out = pair.up(whole)
            source = pair.up(array) if given is array else out[: len(array)]
            expected = pair.host.all_gather(pair.download(source))
            assert pair.gpu.all_gather(source, out=out) is out
            pair.check(out, expected)


@needs_ranks(2)
def test_what_is_broadcast_over_an_array_of_another_dtype_is_no_known_call(make_pair, joined):
    pair = make_pair(joined, STRICT="0")
    sent = values(4, np.float32, pair.rank)
    given = sent if pair.rank == 0 else np.ones(4)  # which a rank that receives does not look at
    for _ in range(3):
        out = pair.up(np.zeros(4, np.float32))
        pair.gpu.broadcast(pair.up(given), out=out)
        pair.check(out, pair.host.broadcast(sent))
    with pytest.raises(InvalidArgumentError, match="out"):
        pair.gpu.broadcast(pair.up(given), out=pair.up(np.zeros(4, np.float32 if pair.rank == 0 else float)))


@needs_ranks(2)
@pytest.mark.parametrize("verb", ["all_reduce", "all_gather"])
def test_a_rank_without_memory_keeps_the_others_from_waiting_in_nccl(comm, make_pair, joined, monkeypatch, verb):
    def call():
        return pair.gpu.all_reduce(SUM, given) if verb == "all_reduce" else pair.gpu.all_gather(given)

    pair = make_pair(joined, STRICT="0")
    given = pair.up(values(10, np.float32, 0))
    call()
    comm.Barrier()  # a rank that gives up aborts calls that have not ended
    if pair.rank == 0:
        monkeypatch.setattr(pair.device.array_module, "empty", Mock(side_effect=MemoryError("planted")))
    told = r"^planted$|rank 0 has left collective .*, where it raised MemoryError: planted"
    with pytest.raises((MemoryError, UnavailableError), match=told):
        call()
    for again in (call, lambda: pair.gpu.all_reduce(SUM, np.ones(1))):
        with pytest.raises(UnavailableError, match=f"an earlier (collective|{verb}) did not end"):
            again()


@needs_ranks(2)
def test_a_deadline_ends_a_first_exchange_while_nccl_connects(comm, monkeypatch):
    """It waits on the host for its peers then, on a thread of its own."""
    monkeypatch.setattr(nccl, "TRIAL_BYTES", TRIAL_BYTES)
    group, device = Group(comm.Dup(), "world"), StandInDevice(comm.rank)
    library = StandInNccl(device, comm)
    transport = nccl.NcclTransport(group, device, library)
    sends, receives = ([device.allocate(64) for _ in range(comm.size)] for _ in range(2))
    if comm.rank == 0:
        with pytest.raises(DeadlineExceededError, match=r"an exchange did not end within 0\.05 s"):
            drive(transport.exchange(sends, receives), lambda: "an exchange", 0.05)
        assert library.aborted == 1
    comm.Barrier()
    device.close()
