"""`mpistrat.mpi4py.wrap`: a communicator of mpi4py whose collectives are ours, called as mpi4py's own are."""

import array
import pickle
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpistrat.mpi4py
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import AgreementError, CollectiveError, DeadlineExceededError, InvalidArgumentError, UnsupportedDtypeError
from mpistrat.groups.group import MOST_UNCONFIRMED
from mpistrat.watch.record import RankFile
from mpistrat.watch.recorder import recorder
from tests.launches import needs_ranks, up_to_ranks
from tests.other_arrays import SpeaksDlpack
from tests.ranks.cases import case

pytestmark = up_to_ranks(3)


@pytest.fixture
def wrapped(comm):
    communicator = mpistrat.mpi4py.wrap(comm.Dup())
    yield communicator
    communicator.Free()


@pytest.fixture
def passing(comm, monkeypatch):
    """Give the test a communicator that hands small arrays to MPI."""
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    communicator = mpistrat.mpi4py.wrap(comm.Dup())
    yield communicator
    communicator.Free()


def _sum_of_ranks(comm):
    return comm.size * (comm.size - 1) // 2


def test_it_is_the_communicator_that_it_wraps_and_what_is_in_the_place_of_allreduce_stays_there(comm):
    wrapped = mpistrat.mpi4py.wrap(comm)
    assert wrapped == comm
    assert isinstance(wrapped, MPI.Intracomm)
    assert (wrapped.rank, wrapped.size, wrapped.name) == (comm.rank, comm.size, comm.name)
    assert wrapped.allreduce({1}, op=lambda a, b: a | b) == {1}, "what is not ours is MPI's"
    mpistrat.Communicator(wrapped).close()  # and it can be wrapped again
    wrapped._communicator.close()
    assert comm.allreduce(1) == comm.size, "the communicator that was wrapped goes on"
    wrapped, calls = mpistrat.mpi4py.intracomm.wrapped(comm.Dup(), None), []
    wrapped.Allreduce = lambda *given: calls.append(given)
    wrapped.Barrier()
    wrapped.Allreduce(1, 2)
    assert calls == [(1, 2)]
    wrapped.Free()


def test_it_is_pickled_where_the_one_that_it_wraps_is():
    wrapped = mpistrat.mpi4py.wrap(MPI.COMM_WORLD, CommunicationOptions(timeout_seconds=77.0))
    restored = pickle.loads(pickle.dumps(wrapped))
    assert restored == MPI.COMM_WORLD
    assert isinstance(restored, mpistrat.mpi4py.intracomm.WrappedIntracomm)
    assert restored._options == wrapped._options
    wrapped._communicator.close()
    twice = wrapped.Dup()
    with pytest.raises(ValueError, match="cannot serialize 'mpi4py.MPI.Intracomm'"):
        pickle.dumps(twice)
    twice.Free()


def test_allreduce_of_every_dtype(wrapped, passing):
    for dtype in ("f8", "f4", "i4", "u1", "i8", "c16", "g", "f2", ml_dtypes.bfloat16):
        before = wrapped._communicator.num_collectives
        for turn in range(3):  # by the fast path, after the first
            for communicator in (wrapped, passing):
                sent, received = (np.arange(5) * turn).astype(dtype), np.zeros(5, dtype)
                communicator.Allreduce(sent, received)
                assert received.tolist() == (wrapped.size * turn * np.arange(5)).tolist(), dtype
                assert sent.tolist() == (turn * np.arange(5)).tolist(), dtype
        assert wrapped._communicator.num_collectives > before, f"{dtype}: made by MPI"


def _specifications(length):
    """Return what a buffer of so many doubles may be given as, each with the array that it is about."""
    doubles = [np.zeros(length) for _ in range(9)]
    fortran = np.zeros((length, 1), order="F")
    plain = array.array("d", [0.0] * length)
    raw = bytearray(8 * length)
    longer = np.zeros(length + 3)
    return {
        "array": (doubles[0], doubles[0]),
        "datatype": ([doubles[1], MPI.DOUBLE], doubles[1]),
        "code": ((doubles[2], "d"), doubles[2]),
        "count": ([doubles[3], length], doubles[3]),
        "count and datatype": ([doubles[4], length, MPI.DOUBLE], doubles[4]),
        "displacement": ([longer, length, 2, MPI.DOUBLE], longer[2 : length + 2]),
        "pair": ([longer, (length, 2), MPI.DOUBLE], longer[2 : length + 2]),
        "more memory than elements": ([longer, length, MPI.DOUBLE], longer[:length]),
        "fortran order": (fortran, fortran.reshape(-1)),
        "array.array": (plain, np.frombuffer(plain)),
        "bytes": ([raw, MPI.DOUBLE], np.frombuffer(raw)),
        "memoryview": (memoryview(doubles[5]), doubles[5]),
        "dlpack": (SpeaksDlpack(doubles[6]), doubles[6]),
        "dlpack before 1.0": (OldDlpack(doubles[7]), doubles[7]),
    }


class OldDlpack(SpeaksDlpack):
    def __dlpack__(self, stream=None):  # whose capsules do not tell whether memory may be written
        return super().__dlpack__()


def test_buffers_are_given_as_to_mpi4py(wrapped):
    sent = _specifications(2)
    for name, received in _specifications(2).items():
        with case(name):
            _check_specification(wrapped, *sent[name], *received)


def _check_specification(wrapped, sent, held, given, memory):
    size, rank = wrapped.size, wrapped.rank
    held[:] = [rank, 1]
    wrapped.Allreduce(sent, given)
    assert memory.tolist() == [_sum_of_ranks(wrapped), size]
    memory[:] = [rank, 1]
    wrapped.Allreduce([MPI.IN_PLACE, MPI.DOUBLE], given, op=MPI.MAX)
    assert memory.tolist() == [size - 1, 1]
    memory[:] = [rank, -rank]
    wrapped.Bcast(given, root=size - 1)
    assert memory.tolist() == [size - 1, 1 - size]
    gathered = np.empty((size, 2))
    wrapped.Allgather(given, gathered)
    assert gathered.tolist() == [[size - 1, 1 - size]] * size
    request = wrapped.Iallreduce(MPI.IN_PLACE, given)
    request.Wait()
    assert memory.tolist() == [size * (size - 1), size * (1 - size)]


def test_buffers_may_be_in_place(wrapped):
    size, rank = wrapped.size, wrapped.rank
    rows = np.full((size, 3), -1.0)
    rows[rank] = rank
    wrapped.Allgather(MPI.IN_PLACE, rows)
    assert rows.tolist() == [[each] * 3 for each in range(size)]
    blocks = np.repeat(np.arange(float(size)), 2)
    wrapped.Reduce_scatter_block(MPI.IN_PLACE, blocks)
    assert blocks[:2].tolist() == [size * rank] * 2
    same = np.full(2, float(rank))
    wrapped.Allreduce(same, same)
    assert same.tolist() == [_sum_of_ranks(wrapped)] * 2
    wrapped.Allreduce(None, same)  # mpi4py takes None for MPI.IN_PLACE
    assert same.tolist() == [size * _sum_of_ranks(wrapped)] * 2


def test_counts_of_allgather_and_reduce_scatter_block_are_those_of_one_rank(wrapped):
    size, rank = wrapped.size, wrapped.rank
    gathered = np.full(2 * size + 1, -1, "i4")
    wrapped.Allgather([np.full(2, rank, "i4"), 2, MPI.INT], [gathered, 2, MPI.INT])
    assert gathered.tolist() == [*np.repeat(range(size), 2), -1]
    part = np.zeros(2, "i4")
    wrapped.Reduce_scatter_block([np.arange(2 * size, dtype="i4"), 2, MPI.INT], [part, MPI.INT])
    assert part.tolist() == [2 * rank * size, (2 * rank + 1) * size]
    received = np.zeros(2)
    wrapped.Allreduce([np.array([1.0, 2.0]), MPI.DOUBLE_COMPLEX], [received, MPI.DOUBLE_COMPLEX], MPI.PROD)
    assert received.view(complex)[0] == (1 + 2j) ** wrapped.size


def test_ranks_may_describe_the_same_bytes_by_other_datatypes(wrapped):
    every_other = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    backwards = MPI.DOUBLE.Create_indexed([1, 1, 1], [2, 1, 0]).Commit()
    root = wrapped.size - 1
    spread = np.array([1.0, -1, 2, -1, 3, -1]) if wrapped.rank == root else np.full(6, -1.0)
    dense = np.zeros(3)
    wrapped.Bcast([spread, 1, every_other] if wrapped.rank in (0, root) else dense, root)
    assert (spread[::2] if wrapped.rank in (0, root) else dense).tolist() == [1, 2, 3]
    assert (spread[1::2] == -1).all(), "gaps are left alone"
    gathered = np.zeros((wrapped.size, 3))
    wrapped.Allgather([np.arange(3.0) + wrapped.rank, 1, backwards], gathered)
    assert gathered.tolist() == [[2.0 + rank, 1.0 + rank, 0.0 + rank] for rank in range(wrapped.size)]
    wrapped.Allgather(np.arange(3.0), [gathered, 1, backwards])
    assert gathered.tolist() == [[2, 1, 0]] * wrapped.size
    every_other.Free()
    backwards.Free()


@pytest.mark.parametrize("given", [None, MPI.COMM_NULL])
def test_what_is_no_intracommunicator_is_refused(given):
    with pytest.raises(InvalidArgumentError, match="a Communicator (is made|needs)"):
        mpistrat.mpi4py.wrap(given)


def test_mpi_makes_the_reductions_that_are_none_of_ours(wrapped):
    def add(source, target, _):
        np.frombuffer(target)[:] += np.frombuffer(source)

    own = MPI.Op.Create(add, commute=True)
    sent, received, part = np.ones(2), np.zeros(2), np.zeros(2)
    wrapped.Allreduce(sent, received, own)
    wrapped.Iallreduce(sent, received, own).Wait()
    assert received.tolist() == [wrapped.size] * 2
    wrapped.Reduce_scatter_block(np.ones(2 * wrapped.size), part, own)
    assert part.tolist() == [wrapped.size] * 2
    own.Free()
    received = np.zeros(2, bool)
    wrapped.Allreduce(np.array([True, False]), received, MPI.LOR)
    assert received.tolist() == [True, False]
    for kind in (MPI.LOGICAL, MPI.PACKED):
        with pytest.raises(MPI.Exception):  # as of mpi4py: they are no numbers
            wrapped.Allreduce([np.ones(kind.size, np.uint8), 1, kind], [np.ones(kind.size, np.uint8), 1, kind])
    pair = np.dtype([("value", "f8"), ("rank", "i4")], align=True)
    found, mine = np.zeros(1, pair), np.array([(-wrapped.rank, wrapped.rank)], pair)
    wrapped.Allreduce([mine, 1, MPI.DOUBLE_INT], [found, 1, MPI.DOUBLE_INT], MPI.MINLOC)
    assert found[0].item() == (1 - wrapped.size, wrapped.size - 1)


def test_requests_are_those_of_mpi(wrapped):
    arrays = [np.full(n, float(wrapped.rank)) for n in (1, 100, 40_000)]
    requests = [wrapped.Iallreduce(MPI.IN_PLACE, each) for each in arrays]
    MPI.Request.Waitall([*requests, wrapped.Ibarrier()])
    assert [set(each.tolist()) for each in arrays] == [{_sum_of_ranks(wrapped)}] * 3
    request = wrapped.Iallreduce(arrays[0], arrays[0].copy())
    assert request.wait() is None
    request = wrapped.Iallreduce(arrays[0], arrays[0].copy())
    while not request.test()[0]:
        pass
    request = wrapped.Iallreduce(arrays[0], arrays[0].copy())
    while not request.Test():
        pass
    wrapped.Barrier()
    wrapped.barrier()


def test_communicators_made_of_it_are_wrapped_too(wrapped):
    half = wrapped.Split(wrapped.rank % 2, -wrapped.rank)
    cart = wrapped.Create_cart([wrapped.size])
    line = cart.Sub([True])
    twice = wrapped.Dup()
    for made in (half, cart, line, twice):
        assert isinstance(made, mpistrat.mpi4py.intracomm.WrappedIntracomm)
        received = np.zeros(1)
        made.Iallreduce(np.ones(1), received).Wait()
        assert made._communicator is None, "a call that must not wait makes nothing that waits"
        made.Allreduce(np.ones(1), received)
        assert received.item() == made.size
        assert made._communicator is not None
        made.Free()
    assert isinstance(cart, MPI.Intracomm)
    assert type(line).__name__ == "WrappedCartcomm"
    assert wrapped.Split(MPI.UNDEFINED) == MPI.COMM_NULL
    with_options = mpistrat.mpi4py.wrap(wrapped.Dup(), CommunicationOptions(deterministic=True))
    twice, request = with_options.Idup()
    request.Wait()
    twice.Barrier()
    made = twice._communicator
    assert made._options.deterministic
    for each in (twice, with_options):
        each.Disconnect()
    assert made.is_closed


def test_memory_of_a_datatype_may_be_at_any_address(wrapped):
    def unaligned():
        return [np.zeros(8 * wrapped.size + 1, np.uint8)[1:].view(float), MPI.DOUBLE]

    for _ in range(2):
        send, receive, part = unaligned(), unaligned(), [unaligned()[0][:1], MPI.DOUBLE]
        send[0][:] = 1
        wrapped.Allreduce(send, receive)
        assert receive[0].tolist() == [wrapped.size] * wrapped.size
        for wait in (MPI.Request.Wait, lambda request: MPI.Request.Waitall([request])):
            send[0][:] = 1
            wait(wrapped.Iallreduce(MPI.IN_PLACE, send))
            assert send[0].tolist() == [wrapped.size] * wrapped.size
        wrapped.Reduce_scatter_block(receive, part)
        assert part[0].tolist() == [wrapped.size**2]


READ_ONLY = np.zeros(3)
READ_ONLY.flags.writeable = False


WRONG_BUFFERS = {
    "lengths": (np.ones(3), np.ones(2), ValueError),
    "dtypes": (np.ones(3), np.ones(3, "f4"), ValueError),
    "strided": (np.ones(6)[::2], np.ones(3), BufferError),
    "strided target": (np.ones(3), np.ones(6)[::2], BufferError),
    "masked": (np.ma.array([1.0, 2.0], mask=[False, True]), np.ones(2), UnsupportedDtypeError),
    "a number": (1.0, np.ones(1), TypeError),
    "too short": ([np.ones(2), 3, MPI.DOUBLE], np.ones(3), ValueError),
    "negative": ([np.ones(2), -1], np.ones(3), ValueError),
    "read-only": (np.ones(3), READ_ONLY, BufferError),
    "read-only in place": (MPI.IN_PLACE, READ_ONLY, BufferError),
    "bottom": ([MPI.BOTTOM, 1, MPI.DOUBLE], np.ones(1), InvalidArgumentError),
}


def test_wrong_and_read_only_buffers_are_refused_as_by_mpi4py(wrapped):
    for name, (send, receive, error) in WRONG_BUFFERS.items():
        with case(name), pytest.raises(error):
            wrapped.Allreduce(send, receive)

    def call(verb, received):  # by all ranks but the root, which sends
        if verb == "Allgather":
            wrapped.Allgather(np.ones(1), received[: wrapped.size])
        elif verb == "Reduce_scatter_block":
            wrapped.Reduce_scatter_block(np.ones(3 * wrapped.size), received)
        elif verb == "Iallreduce":
            wrapped.Iallreduce(READ_ONLY, received).Wait()
        else:
            sent = READ_ONLY if wrapped.rank == 0 else received
            wrapped.Bcast(sent if verb == "Bcast" else [sent, 1, vector])

    vector = MPI.DOUBLE.Create_vector(1, 1, 2).Commit()
    for verb in ("Iallreduce", "Reduce_scatter_block", "Allgather", "Bcast", "Bcast of a vector"):
        sends = verb.startswith("Bcast") and wrapped.rank == 0
        if wrapped.size > 1 or not sends:
            with case(verb), pytest.raises(AgreementError if sends else BufferError):
                call(verb, READ_ONLY)
        call(verb, np.ones(3))
    vector.Free()


_RIGHT = lambda comm: comm.Allreduce(np.ones(2), np.ones(2))  # noqa: E731
_WRONG = {
    "length": lambda comm: comm.Allreduce(np.ones(3), np.ones(3)),
    "dtype": lambda comm: comm.Allreduce(np.ones(2, "f4"), np.ones(2, "f4")),
    "operation": lambda comm: comm.Allreduce(np.ones(2), np.ones(2), MPI.MAX),
    "an operation of MPI's": lambda comm: comm.Allreduce(np.ones(2), np.ones(2), MPI.BAND),
    "a mistake": lambda comm: comm.Allreduce(np.ones(2), np.ones(3)),
    "another call": lambda comm: comm.Bcast(np.ones(2)),
    "barrier": lambda comm: comm.Barrier(),
}


@needs_ranks(2)
def test_ranks_that_differ_are_told_and_without_strict_checks_too(wrapped):
    for name, wrong in _WRONG.items():
        with case(name), pytest.raises((CollectiveError, ValueError) if wrapped.rank == 1 else AgreementError):
            (wrong if wrapped.rank == 1 else _RIGHT)(wrapped)
    for count, root in ((3, 0), (2, 1)):
        with case((count, root)), pytest.raises((CollectiveError, InvalidArgumentError)):
            wrapped.Bcast(np.ones(count), root) if wrapped.rank == 1 else wrapped.Bcast(np.ones(2))
    wrapped._communicator.is_strict = False
    for _ in range(3):
        _RIGHT(wrapped)
    with pytest.raises(AgreementError, match="rank 1: Allreduce by MPI"):
        (_WRONG["an operation of MPI's"] if wrapped.rank == 1 else _RIGHT)(wrapped)


def test_ranks_that_pass_small_arrays_in_other_ways_compare_them_together(passing):
    communicator, size = passing._communicator, passing.size
    for nbytes in (8, 1 << 13, 1 << 14):  # larger ones count as several
        for turn in range(150):
            communicator.timeline.enabled = (turn // 7 + passing.rank) % 3 == 0  # it passes through more of the library
            received = np.empty(nbytes // 8)
            passing.Allreduce(np.full(nbytes // 8, float(turn)), received)
            assert received[-1] == turn * size, turn
    assert size == 1 or len(set(passing.allgather(communicator.hierarchy.call.unconfirmed))) == 1


def test_an_interrupt_in_a_small_sum_leaves_no_lock_held(passing, monkeypatch):
    communicator = passing._communicator
    sent, received = np.ones(3), np.empty(3)
    passing.Allreduce(sent, received)
    [(key, known)] = communicator._programs.passed.items()
    monkeypatch.setitem(communicator._programs.passed, key, (*known[:4], Mock(side_effect=KeyboardInterrupt), *known[5:]))
    with pytest.raises(KeyboardInterrupt):
        passing.Allreduce(sent, received)
    assert communicator._guard.thread._free
    with pytest.raises(CollectiveError, match="did not end"):
        passing.Allreduce(sent, received)


def test_what_is_handed_to_mpi_is_recorded_by_name_whatever_else_was(passing):
    buffers = np.ones(2), np.empty(2)
    for turn in range(280):
        passing.Allreduce(*buffers)
        recorder().intern(f"another call {turn}")
    passing.Allreduce(*buffers)
    assert RankFile(recorder().memory).calls()[0].text.startswith("all_reduce(SUM, [float64 (2,)]")


@needs_ranks(2)
@up_to_ranks(2)
def test_a_deadline_of_one_call_holds_where_arrays_are_handed_to_mpi(comm, passing):
    communicator, options, x = passing.open(), CommunicationOptions(timeout_seconds=0.3), np.ones(3)
    for _ in range(3):
        communicator.all_reduce("sum", x, options)
    if comm.rank:
        comm.Barrier()
    with pytest.raises(DeadlineExceededError, match="did not end within" if comm.rank == 0 else "comes too late"):
        communicator.all_reduce("sum", x, options)
    if comm.rank == 0:
        comm.Barrier()


def test_small_arrays_are_handed_to_mpi_and_compared_later(passing):
    size, rank = passing.size, passing.rank
    for turn in range(MOST_UNCONFIRMED + 16):
        sent, received = np.full((2, 3), rank + turn), np.zeros(6, int)
        padded = np.full(7, rank + turn)
        form = turn % 4
        if form == 0:
            passing.Allreduce(sent if rank else [sent, MPI.LONG], received)
        elif form == 1:
            received[:] = rank + turn
            passing.Allreduce(MPI.IN_PLACE if turn % 8 == 1 else received, received)
        elif form == 2:
            received = padded[1:]
            passing.Allreduce(padded[:-1], received)
        else:
            passing.Allreduce(np.asfortranarray(sent), received)
        assert received.tolist() == [_sum_of_ranks(passing) + turn * size] * 6, turn
    assert size == 1 or 0 < passing._communicator.hierarchy.call.unconfirmed < MOST_UNCONFIRMED
    nan = np.array([np.nan if rank == 0 else 1.0, rank])
    for _ in range(2):
        least = np.zeros(2)
        passing.Allreduce(nan, least, MPI.MIN)
        assert np.isnan(least[0])
        assert least[1] == 0
    received.flags.writeable = False
    with pytest.raises((ValueError, BufferError, InvalidArgumentError)):
        passing.Allreduce(sent, received)


def test_one_array_in_both_places_is_in_place(passing, monkeypatch):
    given = []
    array, size = np.ones(2), passing.size
    both = [array, MPI.DOUBLE]
    passing.Allreduce(np.ones(2), np.ones(2))  # from now on such calls are MPI's
    programs = passing._communicator._programs
    [(key, known)] = programs.passed.items()
    monkeypatch.setattr(programs, "passed", {key: (*known[:4], lambda sent, *_: given.append(sent), *known[5:])})
    for buffers in ((array, array), ([array, MPI.DOUBLE], [array, MPI.DOUBLE]), (both, both), (array, both), (both, array)):
        passing.Allreduce(*buffers)
        passing._communicator.hierarchy.call.calls.pop()
    assert given == [MPI.IN_PLACE] * 5
    monkeypatch.undo()
    recorder().outdated = object()
    passing.Allreduce(both, both)
    assert array.tolist() == [size, size]


@needs_ranks(2)
def test_a_call_is_not_paired_with_one_of_no_operation(passing):
    ones, total = np.ones(5000), np.empty(5000)
    for _ in range(2):
        passing.Allreduce(ones, total)
    if passing.rank == 0:
        with pytest.raises(AttributeError):
            passing.Allreduce(ones, total, "SUM")
    with pytest.raises(AgreementError, match="after a refused Allreduce"):
        passing.Allreduce(ones, total)


@needs_ranks(2)
@pytest.mark.parametrize("is_refused_before", [False, True])
def test_small_arrays_that_differ_are_told_in_the_next_comparison(passing, is_refused_before):
    def add(count, op):
        for _ in range(count):
            passing.Allreduce(np.ones(2), np.ones(2), op)

    add(2, MPI.SUM)
    add(2, MPI.MAX)
    if is_refused_before:  # a call that all have refused
        with pytest.raises(ValueError, match="mismatch in send count"):
            passing.Allreduce(np.ones(3), np.ones(2))
    add(1, MPI.MAX if passing.rank == 1 else MPI.SUM)
    with pytest.raises(AgreementError, match=r"(?s)collective 5 .*all_reduce\((SUM|MAX).*all_reduce\((MAX|SUM)"):
        add(MOST_UNCONFIRMED, MPI.SUM)
