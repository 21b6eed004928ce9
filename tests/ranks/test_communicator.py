"""`mpistrat.Communicator` as authors of libraries use it: on communicators of MPI, arrays and lists, with and without `out`."""

import copy
import pickle
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.algorithms.planners import NOTHING, Measured
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import AgreementError, InvalidArgumentError, LaunchError, SettingError, TransportError, UnavailableError
from mpistrat.groups.group import Group
from tests.launches import needs_ranks, up_to_ranks
from tests.processes import until

pytestmark = up_to_ranks(3)


@pytest.fixture
def whole(comm):
    with mpistrat.Communicator(comm) as communicator:
        yield communicator


def test_it_knows_who_and_where_it_is(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", f"{comm.size - 1}+1" if comm.size > 1 else "1x1")
    with mpistrat.Communicator(comm) as communicator:
        assert (communicator.rank, communicator.size) == (comm.rank, comm.size)
        is_last = comm.rank == comm.size - 1 and comm.size > 1
        assert (communicator.node, communicator.local_rank) == ((1, 0) if is_last else (0, comm.rank))
        assert communicator.world.num_nodes == min(comm.size, 2)


@needs_ranks(2)
@pytest.mark.parametrize("nodes", ["", "virtual"])
def test_some_of_the_ranks_work_by_themselves(comm, monkeypatch, nodes):
    if nodes:
        monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", f"{comm.size}x1")
    colour = comm.rank % 2
    part = comm.Split(colour, -comm.rank)
    members = [rank for rank in reversed(range(comm.size)) if rank % 2 == colour]
    with mpistrat.Communicator(part) as communicator:
        assert communicator.size == len(members)
        assert communicator.world.num_nodes == (len(members) if nodes else 1)
        for _ in range(3 + colour):  # the groups need not make as many calls
            assert communicator.all_reduce("sum", np.full(5, comm.rank)).tolist() == [sum(members)] * 5
            assert communicator.all_gather(np.array([comm.rank])).tolist() == members
    part.Free()
    with mpistrat.Communicator(comm) as communicator:
        assert communicator.all_reduce("sum", np.ones(1)).item() == comm.size


@needs_ranks(3)
def test_errors_name_the_ranks_of_the_job(comm):
    """As tracebacks, the watcher and the doctor do; those of a communicator of some ranks are other numbers."""
    last = comm.size - 1
    part = comm.Split(comm.rank > 0, -comm.rank)
    communicator = mpistrat.Communicator(part)
    if comm.rank:
        named = r"\n  rank(s 1-2| 1): all_reduce\(SUM, \[float64 \(3,\).*\n  rank " + str(last) + r": all_reduce.*\(4,\)"
        with pytest.raises(AgreementError, match=named):
            communicator.all_reduce("sum", np.ones(4 if comm.rank == last else 3))
    else:
        communicator.close()
    communicator = mpistrat.Communicator(part)
    window = communicator._executor.intra.window
    if comm.rank and window is not None:
        if comm.rank == last:
            window.leave()
        part.Barrier()
        with pytest.raises(UnavailableError, match=f"rank {last} has left it"):
            communicator.all_reduce("sum", np.ones(1 << 20))
    else:
        communicator.close()
    part.Free()


def test_a_communicator_is_made_of_an_intracommunicator_and_an_error_leaves_it_open(comm):
    with pytest.raises(InvalidArgumentError, match="like MPI.COMM_WORLD; got str"):
        mpistrat.Communicator("world")
    with pytest.raises(InvalidArgumentError, match="this rank got MPI.COMM_NULL"):
        mpistrat.Communicator(MPI.COMM_NULL)
    with pytest.raises(InvalidArgumentError, match="options must be CommunicationOptions or None; got 'fast'"):
        mpistrat.Communicator(comm, "fast")
    with pytest.raises(ZeroDivisionError), mpistrat.Communicator(comm) as communicator:
        raise ZeroDivisionError
    assert not communicator.is_closed
    communicator.close()


@needs_ranks(2)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda rank: {"options": CommunicationOptions(bytes_per_pack=1000 + rank)}, r"options=CommunicationOptions"),
        (lambda rank: {"measured": Measured({"flat": {16: 1.0 + rank}})}, r".*measured=.*16: 1.0"),
    ],
    ids=["options", "measurements"],
)
def test_arguments_that_differ_are_told(comm, make, told):
    with pytest.raises(AgreementError, match=rf"rank 0: Communicator\({told}"):
        mpistrat.Communicator(comm, **make(comm.rank))
    with mpistrat.Communicator(comm, measured=NOTHING) as communicator:
        assert communicator.all_reduce("sum", np.ones(1)) == [comm.size]


@needs_ranks(2)
def test_options_of_a_call_that_contradict_those_of_the_communicator_are_told(comm):
    communicator = mpistrat.Communicator(comm, CommunicationOptions(wire_dtype="float16"))
    communicator.is_strict = True
    wrong = CommunicationOptions(deterministic=True) if comm.rank == 1 else None
    communicator.note("the same on all ranks", wrong)
    with pytest.raises(InvalidArgumentError if comm.rank == 1 else AgreementError, match="deterministic=True excludes wire"):
        communicator.all_reduce("sum", np.ones(3), wrong)
    communicator.close()


@needs_ranks(2)
def test_settings_that_differ_are_an_error_on_every_rank(comm, monkeypatch):
    others = {"CHUNK_BYTES": "300000", "STRICT": "0", "INTRA_TRANSPORT": "mpi", "ALGORITHM": "flat"}
    for name, value in {**others, "MAX_MESSAGE_BYTES": "4KiB", "TIMEOUT_SECONDS": "5"}.items():
        with monkeypatch.context() as patch:
            if comm.rank == 0:
                patch.setenv(f"MPISTRAT_{name}", value)
            told = rf"(?s)rank 0: settings .*MPISTRAT_{name}(=| set).*\n  ranks? 1.*mpiexec -x NAME"
            with pytest.raises(AgreementError, match=told):
                mpistrat.Communicator(comm)


@needs_ranks(2)
@pytest.mark.parametrize("is_everywhere", [True, False])
def test_a_setting_that_cannot_be_read_is_told_to_all(comm, monkeypatch, is_everywhere):
    monkeypatch.setenv("MPISTRAT_TUNING", "auto")
    for name in ("MPISTRAT_MPI_GPU", "MPISTRAT_PEER_MEMORY", "MPISTRAT_VERBOSE", "MPISTRAT_STRICT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "ture" if is_everywhere or comm.rank == 0 else "off")
            with pytest.raises((SettingError, AgreementError), match=f"{name}='ture'"):
                mpistrat.Communicator(comm)


FAILURES = {
    "a setting": ({"MPISTRAT_ALGORITHM": "best"}, (SettingError, AgreementError)),
    "a transport": ({"MPISTRAT_INTRA_TRANSPORT": "nccl"}, TransportError),
    "tuning": ({}, LaunchError),
}


@needs_ranks(2)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_communicator_that_cannot_be_made_leaves_nothing(comm, monkeypatch, failure):
    variables, error = FAILURES[failure]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if failure == "tuning":
        monkeypatch.setattr("mpistrat.tuning._find", Mock(side_effect=LaunchError("planted")))

    def left():
        duplicate = comm.Dup()  # MPI numbers communicators, and windows are mapped files
        number = duplicate.py2f()
        duplicate.Free()
        return number, len([line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line])

    found = []
    for _ in range(8):
        with pytest.raises(error):
            mpistrat.Communicator(comm)
        found.append(left())
    assert len(set(found)) <= 4, "MPICH takes the numbers of what was freed in turns"


def test_a_group_that_is_closed_leaves_no_message_to_the_next_one(comm):
    closed = Group(comm.Dup(), "world")
    sent = [closed.comm.issend(b"late", rank) for rank in range(comm.size) if rank != comm.rank]
    comm.Barrier()
    closed.close()
    assert until(lambda: MPI.Request.Testall(sent), 20), "received, or MPICH would deliver it in the next communicator"


@needs_ranks(2)
def test_settings_hold_from_when_a_communicator_is_made(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", f"{comm.size}x1")
    with mpistrat.Communicator(comm) as communicator:
        if comm.rank == 1:  # on one rank alone: in this process or by a library
            monkeypatch.setenv("MPISTRAT_MAX_MESSAGE_BYTES", "4KiB")
            monkeypatch.setenv("MPISTRAT_INTER_TRANSPORT", "mpi")
        for count in (100, 10_000, 200_000):
            array = np.arange(count, dtype=np.float32)
            assert np.array_equal(communicator.all_reduce("sum", array), array * comm.size)
            assert communicator.reduce_scatter("sum", array).sum() > 0
            assert np.array_equal(communicator.broadcast(array), array)


def test_what_was_closed_refuses_every_verb(comm):
    communicator, one = mpistrat.Communicator(comm), np.ones(comm.size)
    for _ in range(2):
        communicator.all_reduce("sum", one)
        communicator.all_reduce("sum", one, out=np.empty_like(one))
    communicator.close()
    communicator.close()
    assert communicator.is_closed
    for call in (
        lambda: communicator.all_reduce("sum", one),
        lambda: communicator.all_reduce("sum", one, out=one),
        lambda: communicator.start_all_reduce("sum", one),
        lambda: communicator.reduce_scatter("sum", one),
        lambda: communicator.all_gather(one),
        lambda: communicator.gather(one),
        lambda: communicator.all_to_all(one),
        lambda: communicator.broadcast(one),
        communicator.barrier,
        communicator.memory_report,
        communicator.__enter__,
        lambda: communicator.explain(one),
        lambda: communicator.agree("this"),
    ):
        with pytest.raises(RuntimeError, match=r"this communicator was closed: Communicator\(rank="):
            call()


def test_a_strategy_hands_its_communicator_out_which_has_objects_on_one_device_too(strategy, comm):
    communicator = strategy.communicator
    assert isinstance(communicator, mpistrat.Communicator)
    assert communicator.all_reduce("sum", np.ones(2)).tolist() == [comm.size] * 2
    inside = strategy.run(lambda: strategy.communicator.all_gather(np.array([comm.rank])))
    assert np.asarray(strategy.experimental_local_results(inside)[0]).tolist() == list(range(comm.size))
    communicator = mpistrat.OneDeviceStrategy().communicator
    assert communicator.broadcast_object({1}) == {1}
    assert communicator.gather_objects({1}) == [{1}]
    assert communicator.empty((2, 3), "f2").shape == (2, 3)


def test_objects_of_any_kind_and_size(whole):
    root = whole.size - 1
    found = whole.broadcast_object({"from": whole.rank, "numbers": np.arange(whole.rank)}, root)
    assert (found["from"], found["numbers"].tolist()) == (root, list(range(root)))
    every = whole.gather_objects(["x"] * whole.rank, root=root)
    assert every == ([["x"] * rank for rank in range(whole.size)] if whole.rank == root else None)
    for verb in (whole.broadcast_object, whole.gather_objects):
        with pytest.raises(InvalidArgumentError, match="root must be one of"):
            verb(0, root=whole.size)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_communicator_is_not_copied(whole, copied):
    with pytest.raises(TypeError, match=r"Communicator\(rank=.* can be neither copied nor pickled"):
        copied(whole)


@needs_ranks(2)
def test_objects_that_cannot_be_pickled_and_lists_of_other_lengths_are_told_to_all(whole):
    for verb in (whole.broadcast_object, whole.gather_objects):
        with pytest.raises((AttributeError, pickle.PicklingError, TypeError) if whole.rank == 0 else AgreementError):
            verb((lambda: 0) if whole.rank == 0 else 0)
    with pytest.raises(AgreementError, match="all_gather of 3 arrays"):
        whole.all_gather([np.ones(1)] * (3 if whole.rank else 2))
