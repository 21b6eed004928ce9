"""Where NCCL joins all ranks a call ends when it has been given its work: nothing waits on the host that need not."""

import gc
import sys
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat import packing
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.device.cuda import address
from mpistrat.errors import AgreementError, DeadlineExceededError, InvalidArgumentError, TransportError, UnavailableError
from mpistrat.execution.engine import Work
from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.mpi4py import wrap
from mpistrat.mpi4py.intracomm import Buffer
from mpistrat.reduction import ReduceOp
from mpistrat.torch import average_gradients, broadcast_state
from mpistrat.transports import nccl_watcher
from mpistrat.transports.nccl import NcclTransport
from tests.gpu import stand_in, stand_in_nccl
from tests.gpu.bound import values
from tests.other_arrays import TorchDevice, fake_torch
from tests.processes import until
from tests.ranks.cases import on_thread

pytestmark = pytest.mark.ranks(nodes=["1x2", "2x1"])
on_one_node, on_two_nodes = pytest.mark.ranks(nodes="1x2"), pytest.mark.ranks(nodes="2x1")
on_both_levels = pytest.mark.ranks(nodes=["1x2", "2x2"])

SUM, MEAN, MAX = ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX
SOON_SECONDS = 5.0
PLANTED, FELL_OFF = "planted: a GPU fell off the bus", "planted: a GPU fell off the bus|given up|gave up"
ENDED = TransportError, UnavailableError
AT_LEISURE = CommunicationOptions(timeout_seconds=60.0)  # of the calls before one that is to miss its deadline


@pytest.fixture
def node(make_pair, world, monkeypatch):
    """Give collectives on one node, whose plans have several chunks; or on several that NCCL joins."""
    monkeypatch.setattr(nccl_watcher, "UNSEEN_SECONDS", 60.0)  # a busy machine needs longer until the next call
    pair = make_pair(world, STRICT="0", CHUNK_BYTES="4096", INTER_TRANSPORT="nccl")
    pair.of_nccl = pair.nccl._stream
    return pair


def wait_until(condition):
    assert until(condition, SOON_SECONDS, 0.001)


def held_call(pair, call, stream=None):
    """Make a call while NCCL's stream gets on no further; it gets on when the call has ended, or some time after."""
    before, held = pair.device.current_stream().record(), stream or pair.of_nccl
    wait_until(before.done)
    release = pair.hold(held, SOON_SECONDS)
    results = call()
    assert pair.device.held is held, "the call has waited for NCCL"
    release.cancel()
    pair.device.held = None
    return results


def verbs(node):
    """Return calls of every verb: each takes what brings an array to where it is combined, and a communicator."""
    small = [values(3000, np.float32, node.rank + seed) for seed in range(3)]
    large, rows = values(9000, np.float32, node.rank), values((4 * node.size, 2), np.float32, node.rank)
    return (
        (lambda put, to: to.all_reduce(SUM, put(large))),
        (lambda put, to: to.all_reduce(MEAN, [put(array) for array in small])),
        (lambda put, to: to.reduce_scatter(SUM, put(rows))),
        (lambda put, to: to.reduce_scatter(MEAN, put(rows), 1)),
        (lambda put, to: to.reduce_scatter(SUM, put(rows.astype(np.float16)))),
        (lambda put, to: to.all_gather(put(rows))),
        (lambda put, to: to.all_gather(put(rows), 1)),
        (lambda put, to: to.broadcast(put(rows), node.size - 1)),
        (lambda put, to: to.all_to_all([put(rows)] * node.size)),
    )


def test_every_verb_may_be_called_by_a_thread_that_begins_with_another_gpu(node):
    def up(array):
        with node.device.activate():
            return node.up(array)

    def call_all():
        started = node.gpu.start_all_reduce(SUM, up(np.ones(5000, np.float32)))
        return [*(call(up, node.gpu) for call in verbs(node)), started.wait()]

    expected = [*(call(np.copy, node.host) for call in verbs(node)), np.full(5000, node.size, np.float32)]
    for found, wanted in zip(on_thread(call_all), expected, strict=True):
        node.check(found, wanted)


@on_both_levels
def test_every_verb_ends_when_nccl_has_been_given_its_work(node):
    for call in verbs(node):
        expected = call(np.copy, node.host)
        call(node.up, node.gpu)  # the first time a plan is bound, or ranks are connected
        for _ in range(2):
            node.check(held_call(node, lambda call=call: call(node.up, node.gpu)), expected)


@contextmanager
def refused_in_capture(stream, why):
    """Check that a call raises an error while a stream is captured, and puts nothing there."""
    with stream.capturing() as graph, pytest.raises((InvalidArgumentError, TransportError), match=why):
        yield
    assert not graph


def test_arrays_of_other_shapes_in_turn_are_given_to_nccl_without_waiting_for_those_before(node, monkeypatch):
    monkeypatch.setattr("mpistrat.communicator.programs.PROGRAMS_KEPT", 4)  # so that each is new
    given = [values((2 * rows, 3), np.float32, node.rank) for rows in range(1, 8)] * 2
    for call in (
        lambda array, to: to.all_reduce(SUM, array),
        lambda array, to: to.all_reduce(MEAN, array),
        lambda array, to: to.reduce_scatter(SUM, array),
    ):
        arrays = [node.up(array) for array in given]
        call(arrays[0], node.gpu)  # a kernel is loaded
        found = held_call(node, lambda call=call, arrays=arrays: [call(array, node.gpu) for array in arrays])
        node.check(found, [call(array, node.host) for array in given])


def test_what_cannot_be_captured_raises_before_anything_is_enqueued(node):
    for call in verbs(node):
        given, expected = [], call(np.copy, node.host)
        put = lambda value, given=given: given.append(node.up(value)) or given[-1]  # noqa: E731
        for _ in range(2):
            given.clear()
            node.check(call(put, node.gpu), expected)
            arrays = iter(given)
            with refused_in_capture(node.device.current_stream(), "a CUDA graph is being captured"):
                call(lambda _, arrays=arrays: next(arrays), node.gpu)
    for _, start, arrays, _ in started(node):
        given = bring(node, arrays)
        with refused_in_capture(node.device.current_stream(), "a CUDA graph is being captured"):
            start(given)
    assert not node.library.aborted


@on_both_levels
def test_gpus_exchange_what_nccl_does_not_combine_and_what_is_added_in_order(node):
    floats = np.random.default_rng(node.rank).standard_normal(1003, np.float32)
    gapped, in_order = np.where(np.arange(1003) % 7 == node.rank, np.nan, floats), CommunicationOptions(deterministic=True)
    for op, array, options in ((MAX, gapped, None), (SUM, floats.astype(np.int16), None), (SUM, floats, in_order)):
        sent = node.library.calls["send"]
        for _ in range(2):
            found = node.device.get(node.gpu.all_reduce(op, node.up(array), options))
            np.testing.assert_array_equal(found, node.host.all_reduce(op, array, options))
        assert node.library.calls["send"] == sent + 2 * (node.size - 1)


@on_both_levels
def test_an_all_reduce_may_be_a_part_of_a_graph_and_is_done_in_each_replay(node):
    one, many = values(3000, np.float32, node.rank), [values(count, np.float64, node.rank) for count in (1, 70)]
    half, native = values(5, np.float16, node.rank), CommunicationOptions(intra_dtype="native")
    given, apart, halves = node.up(one), [node.up(array) for array in many], node.up(half)
    stream, calls = node.device.current_stream(), dict(node.library.calls)
    with node.gpu.capture():
        node.gpu.all_reduce(SUM, node.up(one))  # not a part of it
        with stream.capturing() as graph:
            assert node.gpu.all_reduce(MEAN, given, out=given) is given
            node.gpu.all_reduce(SUM, apart, out=apart)
            node.gpu.all_reduce(SUM, halves[:], native, out=halves)  # another view of it is it
    arrays, contents = [given, *apart, halves], [one, *many, half]
    assert node.library.calls["allReduce"] == calls["allReduce"] + 1 + 1 + 2 + 1
    for array, value in zip(arrays, contents, strict=True):
        assert np.array_equal(node.device.get(array), value), "nothing is done when it is captured"
    expected = [node.host.all_reduce(MEAN, one), *node.host.all_reduce(SUM, many), node.host.all_reduce(SUM, half)]
    for _ in range(3):
        for array, value in zip(arrays, contents, strict=True):
            array[...] = node.up(value)
        for work in graph:
            stream.put(work)
        node.check(arrays, expected)
        node.check(node.gpu.all_reduce(SUM, node.up(one)), node.host.all_reduce(SUM, one))  # between replays


def test_what_a_graph_cannot_do_raises_on_all_ranks(node):
    given, words = node.up(values(30, np.float32, node.rank)), node.up(values(3, np.int16, node.rank))
    half, stream = node.up(values(3, np.float16, node.rank)), node.device.current_stream()
    gapped = node.up(values((4, 4), np.float32, node.rank)).T
    refused = (
        (lambda: node.gpu.all_reduce(SUM, given), "needs out="),
        (lambda: node.gpu.all_reduce(SUM, gapped, out=node.up(np.empty((4, 4), np.float32))), "C-contiguous"),
        (lambda: node.gpu.all_reduce(SUM, [given[:20]], out=[given[10:]]), "must be|apart"),
        (lambda: node.gpu.all_reduce(SUM, [given[:15], given[15:]], out=[given[15:], given[:15]]), "share no memory"),
        (lambda: node.gpu.all_reduce(SUM, half, out=half), "intra_dtype='native'"),
        (lambda: node.gpu.all_reduce(SUM, given, CommunicationOptions(deterministic=True), out=given), "deterministic"),
        (lambda: node.gpu.all_reduce(SUM, words, out=words), "NCCL does not combine int16"),
        (lambda: node.gpu.start_all_reduce(SUM, given, out=given), "only all_reduce can be a part"),
        (lambda: node.gpu.broadcast(given, out=given), "only all_reduce can be a part"),
    )
    with node.gpu.capture():
        for call, why in refused:
            with refused_in_capture(stream, why):
                call()
    with pytest.raises(UnavailableError, match="here ranks compute on CPUs"), node.host.capture():
        pass
    with pytest.raises(AgreementError), node.gpu.capture(), stream.capturing() if node.rank else nullcontext():
        node.gpu.all_reduce(SUM, given, out=given)


def test_what_is_captured_in_one_block_in_another_does_not_end_that(node):
    given, stream = node.up(values(30, np.float32, node.rank)), node.device.current_stream()
    with node.gpu.capture():
        with node.gpu.capture():
            pass
        with stream.capturing() as graph:
            node.gpu.all_reduce(SUM, given, out=given)
        assert graph
    with refused_in_capture(stream, "only all_reduce can be a part of it, in Communicator.capture"):
        node.gpu.all_reduce(SUM, given, out=given)


def test_what_pytorch_captures_on_another_stream_takes_no_arrays_of_cupy(node, monkeypatch):
    given, expected = node.up(values(30, np.float32, node.rank)), node.host.all_reduce(SUM, values(30, np.float32, node.rank))
    made, out = node.gpu.all_reduce(SUM, given), node.up(np.empty(30, np.float32))  # both calls are known from now on
    node.gpu.all_reduce(SUM, given, out=out)
    of_torch = node.device.stream()
    cuda = SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    cuda.current_stream = lambda: SimpleNamespace(cuda_stream=of_torch.pointer)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    calls = (
        lambda: node.gpu.all_reduce(SUM, given),
        lambda: node.gpu.all_reduce(SUM, given, out=out),
        lambda: node.gpu.start_all_reduce(SUM, given),
        lambda: node.gpu.broadcast(given),
    )
    for call in calls:
        for where in (nullcontext, node.gpu.capture):
            with where(), pytest.raises(InvalidArgumentError, match="PyTorch is capturing a CUDA graph"):
                call()
    node.check(made, expected)
    with node.device.activate(of_torch), node.gpu.capture(), of_torch.capturing() as graph:
        node.gpu.all_reduce(SUM, given, out=out)
    assert graph


@pytest.mark.parametrize("fails", ["as it is captured", "as the capture is prepared"])
def test_a_rank_that_fails_in_a_capture_is_waited_for_by_none(node, monkeypatch, fails):
    given, stream, error = node.up(values(30, np.float32, node.rank)), node.device.current_stream(), OSError("planted")
    if node.rank == 0:
        where, name = (node.nccl, "capture") if fails == "as it is captured" else (node.device, "prepare")
        monkeypatch.setattr(where, name, Mock(side_effect=error))

    def call_all():
        with node.gpu.capture():
            with stream.capturing():
                node.gpu.all_reduce(SUM, given, out=given)
            node.gpu.all_reduce(SUM, given)

    # told by rank 0 itself, or by NCCL, which it has aborted
    with pytest.raises((OSError, *ENDED), match="planted" if node.rank == 0 else "rank 0|another rank has given up"):
        call_all()
    if node.rank == 0 and fails == "as it is captured":
        wait_until(lambda: node.library.aborted)


def started(node):
    """Return calls that start each verb on one array or several, and what they return in host memory."""
    small = [values(3000, np.float32, node.rank + seed) for seed in range(3)]
    rows = values((4 * node.size, 2), np.float32, node.rank)

    def call(verb, arrays, *op, axis=()):
        start, host = getattr(node.gpu, f"start_{verb}"), getattr(node.host, verb)
        return verb, lambda given: start(*op, given, *axis), arrays, host(*op, arrays, *axis)

    return (
        call("all_reduce", small[0], SUM),
        call("all_reduce", small, MEAN),
        call("reduce_scatter", rows, SUM),
        call("all_gather", [rows]),
        call("all_gather", rows, axis=(1,)),
    )


def bring(node, arrays):
    return [node.up(each) for each in arrays] if type(arrays) is list else node.up(arrays)


@on_both_levels
def test_what_is_started_is_enqueued_and_a_stream_waits_for_it(node):
    for name, start, arrays, expected in started(node):
        start(bring(node, arrays)).wait()  # the first time a plan is bound
        given = [bring(node, arrays) for _ in range(packing.HOST_TABLES)]  # at other addresses each
        works = held_call(node, lambda start=start, given=given: [start(each) for each in given])
        assert not works[-1].done(), name
        for work in works:
            node.check(work.wait(), expected)
        assert works[-1].done()


def test_a_program_may_wait_for_what_it_has_started(node):
    given, expected = values(3000, np.float32, node.rank), node.host.all_reduce(SUM, values(3000, np.float32, node.rank))
    out = node.up(given)
    node.gpu.start_all_reduce(SUM, out).wait(host=True)
    node.hold(node.of_nccl, 0.3)
    work = node.gpu.start_all_reduce(SUM, out, out=out)
    assert work.wait(host=True) is out
    assert node.device.held is None
    assert work.done()
    with node.device.activate(node.device.stream()):  # which waits for nothing
        node.check(out, expected)


@on_one_node
def test_waiting_for_what_was_started_keeps_to_the_deadline_of_the_call(make_pair, world):
    node = make_pair(world, TIMEOUT_SECONDS="0.5", INTER_TRANSPORT="nccl")
    given = node.up(values(3000, np.float32, node.rank))
    node.gpu.start_all_reduce(SUM, given, AT_LEISURE).wait(host=True)
    expected = node.host.all_reduce(SUM, node.device.get(given), AT_LEISURE)
    node.hold(node.nccl._stream, 1.0)
    node.check(node.gpu.start_all_reduce(SUM, given, AT_LEISURE).wait(host=True), expected)


def test_memory_of_what_was_started_is_free_when_its_stream_waits_for_the_end_or_that_has_come(node):
    def wait_elsewhere(work):
        with node.device.activate(node.device.stream()):
            work.wait()

    by_host, by_polls = lambda work: work.wait(host=True), lambda work: wait_until(work.done)
    for wait, is_free in ((Work.wait, True), (by_host, True), (by_polls, True), (wait_elsewhere, False)):
        given = [node.up(values(3000, np.float32, node.rank))]
        kept = weakref.ref(given[0])
        release = node.hold(node.of_nccl, 0.1)
        work = node.gpu.start_all_reduce(SUM, given.pop())
        assert kept() is not None
        wait(work)
        del work  # which knows what it was given
        assert (kept() is None) == is_free
        release.join()


def test_a_result_that_was_dropped_is_read_to_the_end_before_what_another_stream_starts_gets_its_memory(node):
    device, given = node.device, values(3000, np.float32, node.rank)
    one, other, into = device.stream(), device.stream(), device.allocate(12000)
    for _ in range(3):
        node.comm.Barrier()
        with device.activate(one):
            result = node.gpu.start_all_reduce(SUM, node.up(given)).wait(host=True)
            device.held = one
            one.copy(address(into), address(result), result.nbytes)
            del result
        with device.activate(other):
            for _ in range(3):
                node.gpu.start_all_reduce(MEAN, node.up(given)).wait(host=True)
            device.held = None
        with device.activate(one):
            node.check(into.view(np.float32), node.host.all_reduce(SUM, given))


@on_both_levels
def test_so_does_a_plan_in_phases(node):
    """NCCL combines inside nodes, along the rails, and inside again: each in a communicator of its own."""
    options, given = CommunicationOptions(algorithm="hierarchical"), values(1000, np.float32, node.rank)
    inside = node.gpu._gpu.executor.intra
    if inside.name == "nccl":
        node.gpu.all_reduce(SUM, node.up(given), options)
        calls = node.library.calls.copy()
        found = held_call(node, lambda: node.gpu.all_reduce(SUM, node.up(given), options), inside._stream)
        node.check(found, node.host.all_reduce(SUM, given, options))
        phases = {"reduceScatter": 1, "allReduce": 1, "allGather": 1} if node.world.num_nodes > 1 else {"allReduce": 1}
        assert node.library.calls - calls == phases
        assert len(node.library.communicators) == (3 if node.world.num_nodes > 1 else 1)


def test_a_call_whose_time_is_taken_waits_for_its_end_and_one_with_a_deadline_does_not(node):
    gpu, given = node.gpu, node.up(values(100, np.float32, node.rank))

    def ends_late(seconds=2.0, **options):  # a busy machine may take long to make the call
        gpu.all_reduce(SUM, given, **options)
        release = node.hold(node.of_nccl, seconds)
        gpu.all_reduce(SUM, given, **options)
        has_waited = node.device.held is None
        release.cancel()
        node.device.held = None
        return has_waited

    assert not ends_late()
    assert not ends_late(options=CommunicationOptions(timeout_seconds=60.0))
    gpu.timeline.enabled = True
    assert ends_late(seconds=0.1)


@pytest.fixture
def stuck(node, monkeypatch):
    """Give what makes NCCL's next kernels run until it is called again, or NCCL is aborted."""
    is_stuck, issue = [False], node.nccl._issue

    def stick(until_aborted=True):
        is_stuck[0] = until_aborted

    def issue_stuck(calls):
        if is_stuck[0]:
            node.of_nccl.put(lambda: stand_in.UNFINISHED if is_stuck[0] and not node.library.aborted else None)
        issue(calls)

    monkeypatch.setattr(node.nccl, "_issue", issue_stuck)
    yield stick
    stick(False)


@pytest.mark.parametrize("is_waited_in", [False, True])
def test_a_deadline_that_passes_on_the_gpu_is_raised_by_the_next_call_of_each_rank(node, stuck, is_waited_in):
    """Also where a rank waits in it for another one, which comes when that has raised."""
    given, options = node.up(values(100, np.float32, node.rank)), CommunicationOptions(timeout_seconds=0.5)
    for _ in range(3):
        node.gpu.all_reduce(SUM, given, AT_LEISURE)
    node.device.get(given)
    node.comm.Barrier()
    stuck()
    node.gpu.all_reduce(SUM, given, options)
    if not is_waited_in:
        wait_until(lambda: node.library.aborted)
        node.comm.Barrier()
    elif node.rank == 1:  # rank 0 waits in the next call, which must not wait for this one
        wait_until(lambda: node.comm.Iprobe(0))
        node.comm.recv(source=0)
    whose = r"rank \d, \w.*has not ended within 0\.\d+ s on the GPU, although all ranks came to the call"
    with pytest.raises((DeadlineExceededError, *ENDED), match=rf"(?s){whose}|given up|gave up") as caught:
        node.gpu.all_reduce(SUM, given, CommunicationOptions(timeout_seconds=30.0) if is_waited_in else None)
    if is_waited_in and node.rank == 0:
        node.comm.send("it has raised", 1)
    assert any(node.comm.allgather(isinstance(caught.value, DeadlineExceededError)))


@on_two_nodes
@pytest.mark.parametrize("is_overdue", [False, True])
def test_what_was_started_raises_what_ends_it_on_the_gpu(node, stuck, is_overdue):
    given = node.up(values(100, np.float32, node.rank))
    options = CommunicationOptions(timeout_seconds=0.5 if is_overdue else 60)
    node.gpu.start_all_reduce(SUM, given, AT_LEISURE).wait(host=True)
    node.comm.Barrier()
    stuck()
    work = node.gpu.start_all_reduce(SUM, given, options)
    if not is_overdue:
        node.library.error = PLANTED
    with pytest.raises((DeadlineExceededError, *ENDED)):
        work.wait(host=True)
    for again in (work.done, work.wait):
        with pytest.raises((DeadlineExceededError, TransportError)):
            again()


def test_a_rank_raises_at_once_although_nccl_waits_for_its_peers_where_it_is_aborted(node):
    given = node.up(values(100, np.float32, node.rank))
    node.gpu.all_reduce(SUM, given)
    node.comm.Barrier()
    if node.rank == 0:
        began = time.monotonic()
        node.nccl.abort("planted")
        assert time.monotonic() < began + stand_in_nccl.ABORT_SECONDS / 2
        with pytest.raises(TransportError, match="planted"):
            node.nccl.raise_failure()
    node.comm.Barrier()
    node.gpu._guard.fail("all_reduce", TransportError("planted"))


def test_a_call_that_waits_for_room_on_a_stream_is_ended_by_the_watcher(node, monkeypatch):
    monkeypatch.setattr(stand_in, "STUCK_SECONDS", SOON_SECONDS)
    given = node.up(values(100, np.float32, node.rank))
    node.gpu.all_reduce(SUM, given, out=given)
    node.device.queue_depth = 12
    node.comm.Barrier()
    if node.rank == 0:
        node.of_nccl.put(lambda: None if node.library.aborted else stand_in.UNFINISHED)  # a GPU that gets no further
    threading.Timer(0.3, lambda: setattr(node.library, "error", PLANTED)).start()
    calls = (node.gpu.all_reduce(SUM, given, out=given) for _ in range(1000))
    with pytest.raises(ENDED, match=FELL_OFF):
        list(calls)
    assert node.library.aborted == len(node.library.communicators)
    node.comm.Barrier()
    node.device.queue_depth = stand_in.QUEUE_DEPTH


def test_nccl_is_not_called_after_the_watcher_has_aborted_it_while_the_stream_had_no_room(node, monkeypatch):
    given = node.up(values(100, np.float32, node.rank))
    node.gpu.all_reduce(SUM, given, out=given)
    follow = node.nccl._follow

    def aborted_meanwhile(current):
        follow(current)
        node.nccl.abort("planted")

    monkeypatch.setattr(node.nccl, "_follow", aborted_meanwhile)
    with pytest.raises((TransportError, UnavailableError), match="planted|has given up"):
        node.gpu.all_reduce(SUM, given, out=given)
    node.comm.Barrier()


def test_a_communicator_that_is_dropped_is_not_destroyed_on_one_rank_alone(node):
    communicator = Communicator(Hierarchy(node.comm, node.world))
    communicator.all_reduce(SUM, node.up(values(100, np.float32, node.rank)))
    node.device.synchronize()
    watcher = communicator._gpu.executor.transports.everywhere._watcher
    watcher.stop()  # its thread would keep everything
    del communicator, watcher
    gc.collect()
    assert not node.device.errors


@on_two_nodes
def test_what_comes_later_does_not_make_a_call_miss_its_deadline(node, monkeypatch):
    given, options = node.up(values(100, np.float32, node.rank)), CommunicationOptions(timeout_seconds=1.0)
    node.gpu.all_reduce(SUM, given, options)
    node.gpu.all_reduce(SUM, given)
    monkeypatch.setattr(nccl_watcher, "CHECK_SECONDS", 0.3)  # so that the watcher does not look in between
    time.sleep(0.1)
    node.comm.Barrier()
    node.device.get(node.gpu.all_reduce(SUM, given, options))
    release = node.hold(node.of_nccl, 1.5)
    node.gpu.all_reduce(SUM, given)
    release.join()
    node.gpu.all_reduce(SUM, given, options)
    assert not node.library.aborted


def test_a_rank_that_fails_when_all_have_met_leaves_no_kernel_waiting(node, monkeypatch):
    """The others have gone on by then, and their kernels wait for one that never comes."""
    given = node.up(values(100, np.float32, node.rank))
    node.gpu.all_reduce(SUM, given)
    if node.rank == 0:

        def fail(*_):
            time.sleep(0.2)
            raise RuntimeError("planted: no kernel can be launched")

        monkeypatch.setattr(node.nccl, "_issue", fail)
        with pytest.raises(RuntimeError, match="planted"):
            node.gpu.all_reduce(SUM, given)
    else:
        with suppress(TransportError):  # where it is late, and rank 0 has failed before
            node.gpu.all_reduce(SUM, given)
    wait_until(lambda: node.library.aborted)
    with pytest.raises(ENDED, match="another rank has given up|gave up|did not end|has left collective"):
        node.gpu.all_reduce(SUM, given)
    node.comm.Barrier()


def test_kernels_of_two_communicators_begin_in_the_order_of_the_program(node):
    """On whichever streams the program calls them: those of one GPU would wait for those of another for ever."""
    given = values(100, np.float32, node.rank)
    with Communicator(Hierarchy(node.comm, node.world)) as other:
        of_other = other._gpu.executor.transports.everywhere._stream
        first, second = node.up(given), node.up(given)
        for communicator in (node.gpu, other):
            communicator.all_reduce(SUM, first)
        node.device.get(first)
        node.device.held = node.of_nccl
        node.gpu.all_reduce(SUM, first)
        with node.device.activate(node.device.stream()):
            found = other.all_reduce(SUM, second)
            ends = time.monotonic() + 0.2
            while time.monotonic() < ends:
                node.device.progress()
            has_waited = bool(of_other.waiting)
            node.device.held = None
            assert has_waited, "it began before what was called first has ended"
            node.check(found, node.host.all_reduce(SUM, given))


def test_the_first_sums_of_a_communicator_begin_when_kernels_of_another_have_ended(node):
    given = node.up(values(100, np.float32, node.rank))
    node.gpu.all_reduce(SUM, given)
    with node.device.activate(node.device.stream()):
        node.device.get(node.gpu.all_reduce(SUM, given))
        node.device.held = node.of_nccl
        node.gpu.all_reduce(SUM, given)
    release = node.hold(node.of_nccl, 0.3)
    other = NcclTransport(Group(node.comm, "other"), node.device, node.library)
    assert node.device.held is None, "they were summed while a kernel of another communicator waited for its peers"
    release.join()
    other.dispose()


@on_one_node
def test_closing_waits_for_what_was_enqueued(comm, make_pair):
    pair = make_pair(STRICT="0")
    communicator = Communicator(Hierarchy(comm, pair.world))
    stream, given = communicator._gpu.executor.intra._stream, pair.up(values(100, np.float32, pair.rank))
    communicator.all_reduce(SUM, given)
    pair.device.held = stream
    communicator.all_reduce(SUM, given)
    release = pair.hold(stream, 0.1)
    communicator.close()
    release.join()
    assert not stream.waiting


def test_a_call_of_mpi4py_returns_when_its_result_may_be_read_on_any_stream(node):
    given, wrapped = values(3000, np.float32, node.rank), wrap(node.comm)
    source, target = node.up(given), node.device.array_module.empty(3000, np.float32)
    for _ in range(3):
        wrapped.Allreduce(source, target)
        with node.device.activate(node.device.stream()):
            node.check(target, node.host.all_reduce(SUM, given))
    communicator = wrapped.open()
    for wait in (MPI.Request.Wait, MPI.Request.wait, lambda request: MPI.Request.Waitall([request])):
        started = node.device.array_module.empty(3000, np.float32)
        node.hold(communicator._gpu.executor.transports.everywhere._stream, 0.1)
        wait(wrapped.Iallreduce(source, started))
        assert node.device.held is None
        with node.device.activate(node.device.stream()):
            node.check(started, node.host.all_reduce(SUM, given))
    node.device.held = communicator._gpu.executor.transports.everywhere._stream
    threading.Timer(0.1, lambda: setattr(node.library, "error", PLANTED)).start()
    with pytest.raises(ENDED, match=FELL_OFF):
        wrapped.Allreduce(source, target)
    assert communicator.hierarchy.call.has_failed, "the watcher of NCCL would raise it once more, and end the job"
    node.comm.Barrier()
    node.device.held, node.library.error = None, ""
    communicator.close()


@on_one_node
def test_datatypes_with_gaps_are_refused_for_memory_of_a_gpu(node):
    """MPI would pack them, and crash where it is not CUDA-aware."""
    pairs = MPI.FLOAT.Create_vector(2, 1, 2).Commit()
    with pytest.raises(InvalidArgumentError, match="memory of a GPU is taken with datatypes without gaps only"):
        Buffer([node.up(np.ones(4, np.float32)), 1, pairs])
    pairs.Free()


class _Tensor:
    """A tensor of PyTorch on the stand-in GPU, as far as its gradient is averaged."""

    layout, dtype, requires_grad = "strided", "float32", False

    def __init__(self, array):
        self.array, self.grad = array, None
        self.numel, self.element_size = (lambda: array.size), (lambda: array.itemsize)
        self.is_conj = self.is_neg = lambda: False

    @property
    def device(self):
        return TorchDevice(f"cuda:{self.array.device.id}")

    def detach(self):
        return self

    resolve_conj = resolve_neg = detach

    def on_stand_in(self, device):
        return self.array


class _Parameter:
    """A parameter of PyTorch, as far as its gradient is averaged."""

    requires_grad = True

    def __init__(self, tensor):
        self.numel, self.element_size, self.detach, self.grad = tensor.numel, tensor.element_size, lambda: tensor, None
        self.dtype, self.device = tensor.dtype, "cuda:0"

    def register_hook(self, _):
        return SimpleNamespace(remove=lambda: None)

    def register_post_accumulate_grad_hook(self, hook):
        self.accumulated = hook
        return SimpleNamespace(remove=lambda: None)


@pytest.mark.parametrize("count", [100, 30000])
def test_pytorch_waits_on_its_own_stream_for_what_was_written_to_its_tensors(node, monkeypatch, count):
    of_torch = node.device.stream()

    def from_dlpack(array):
        of_torch.wait(node.device.current_stream().record())  # PyTorch asks for that, for its current stream
        return _Tensor(array)

    torch = fake_torch()
    torch.Tensor, torch.from_dlpack, torch.strided, torch.nn = _Tensor, from_dlpack, "strided", SimpleNamespace(Module=_Tensor)
    monkeypatch.setitem(sys.modules, "torch", torch)
    given = values((count,), np.float32, node.rank)
    expected, sent = node.host.all_reduce(MEAN, given), node.host.broadcast(given, 1)
    model = _Tensor(node.up(given))
    model.named_parameters, model.named_buffers = (lambda: [("early", early), ("late", late)]), (lambda: [])
    early, late = _Parameter(model), _Parameter(_Tensor(node.up(given)))
    for turn in range(8):
        early.grad, late.grad, model.array = _Tensor(node.up(given)), _Tensor(node.up(given)), node.up(given)
        early.grad = early.grad if turn % 2 else None  # then nothing follows what was started
        with average_gradients(model, node.gpu, CommunicationOptions(bytes_per_pack=1)):
            held_call(node, lambda: late.accumulated(late))  # which starts its bucket
        with node.device.activate(of_torch):
            node.check(late.grad.array, expected)
            assert early.grad is None or np.array_equal(node.device.get(early.grad.array), expected)
        broadcast_state(model, communicator=node.gpu, root=1)
        with node.device.activate(of_torch):
            node.check(model.array, sent)
