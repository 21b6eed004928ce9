"""NCCL between nodes, where it is asked for: one communicator joins all ranks. The stand-in's streams dawdle."""

import numpy as np
import pytest

import mpistrat
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import AgreementError, TransportError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.topology.world import World
from mpistrat.transports import nccl
from tests.gpu import stand_in_nccl
from tests.gpu.bound import Pair, stand_in, values
from tests.launches import needs_ranks, up_to_ranks

pytestmark = [needs_ranks(4), up_to_ranks(4)]

SUM, MEAN = mpistrat.ReduceOp.SUM, mpistrat.ReduceOp.MEAN


@pytest.fixture(params=["2x2", "3+1"])
def nodes(request, monkeypatch):
    """Give a world of several nodes, with NCCL asked for between them."""
    monkeypatch.setenv("MPISTRAT_INTER_TRANSPORT", "nccl")
    return World.from_shape(request.param)


@pytest.fixture
def pair(make_pair, nodes):
    return make_pair(nodes)


@pytest.fixture
def cannot_join(comm, monkeypatch):
    """Give a function that has a rank fail to make communicators of so many ranks."""
    join = stand_in_nccl.StandInNccl.NcclCommunicator

    def plant(patch, who, num_ranks):
        def fail(library, size, *arguments):
            if (comm.rank, size) == (who, num_ranks):
                raise RuntimeError("planted: no queue pair")
            return join(library, size, *arguments)

        patch.setattr(stand_in_nccl, "CONNECT_SECONDS", 0.5)
        patch.setattr(stand_in_nccl.StandInNccl, "NcclCommunicator", fail)

    return plant


def test_ranks_of_which_one_cannot_join_its_rail_raise_together(make_pair, monkeypatch, cannot_join):
    pair = make_pair("2x2", INTER_TRANSPORT="nccl")
    given, options = [values(100, np.float32, pair.rank)], CommunicationOptions(algorithm="hierarchical")
    with monkeypatch.context() as patch:
        cannot_join(patch, 3, 2)
        with pytest.raises(TransportError, match=r"cannot move memory of GPUs here: rail 1: NCCL could not join.*Accepted"):
            pair.gpu.all_reduce(SUM, list(map(pair.up, given)), options)
    pair.compare(SUM, given)  # nothing is out of step
    pair.compare(SUM, given, options)


def test_the_plan_says_why_and_casts_between_nodes_stay(pair):
    explained = str(pair.gpu.explain(pair.up(np.ones(1000, np.float32))))
    assert "nccl joins all ranks, and chooses how" in explained
    assert "nccl inside nodes, nccl between nodes" in explained
    options = CommunicationOptions(wire_dtype="bfloat16", algorithm="hierarchical")
    array = np.full((8, 3), 1 + 2**-10, np.float32)  # which bfloat16 rounds to 1
    for verb in ("all_reduce", "reduce_scatter"):
        found, expected = getattr(pair.gpu, verb)(SUM, pair.up(array), options=options), np.full((8, 3), 4.0)
        np.testing.assert_array_equal(pair.device.get(found), expected[: found.shape[0]])


def test_auto_takes_it_where_all_ranks_have_an_adapter(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "off")
    given = [values(1000, np.float32, comm.rank)]
    for lacks in ("", "planted: only sockets"):
        answer = lacks if comm.rank == 2 else ""
        monkeypatch.setattr(nccl.NcclTransport, "network_refusal", lambda answer=answer: answer)
        with Pair(comm, World.from_shape("2x2")) as pair:
            calls = pair.library.calls["allReduce"]
            pair.compare(SUM, given, CommunicationOptions(algorithm="flat"))
            assert (pair.library.calls["allReduce"] == calls) == bool(lacks)
            assert ("nccl inside nodes, nccl between nodes" in pair.gpu.path) == (not lacks)
            assert pair.gpu.path.endswith(f"not by nccl: {lacks}") == bool(lacks)
    with Pair(comm, World.from_shape("4x1"), has_nccl=False) as pair:
        assert "not by nccl: CuPy finds no libnccl.so.2" in pair.gpu.path


def test_auto_goes_on_without_it_if_one_rank_cannot_join(comm, monkeypatch, cannot_join):
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "off")
    monkeypatch.setattr(nccl.NcclTransport, "network_refusal", lambda: "")
    cannot_join(monkeypatch, 3, comm.size)
    with Pair(comm, World.from_shape("2x2")) as pair:
        assert "staged over mpi_ring between nodes" in pair.gpu.path
        assert "not by nccl: world: NCCL could not join" in pair.gpu.path
        pair.compare(SUM, [values(1000, np.float32, comm.rank)])


@pytest.mark.parametrize("who", [0, 3])
def test_ranks_of_which_one_cannot_join_raise_together(comm, nodes, monkeypatch, cannot_join, who):
    cannot_join(monkeypatch, who, comm.size)
    hierarchy = Hierarchy(comm, nodes)
    told = r"INTER_TRANSPORT=nccl cannot move memory of GPUs here: world: NCCL could not join.*Accepted are auto, mpi_ring, mpi"
    with stand_in(comm):
        library = nccl.find_binding()
        with pytest.raises(TransportError, match=told):
            mpistrat.Communicator(hierarchy)
        assert library.aborted == len(library.communicators), "no rank keeps a communicator"


def test_ranks_without_nccl_are_told_what_is_accepted(comm, nodes):
    hierarchy = Hierarchy(comm, nodes)
    with stand_in(comm, has_nccl=False), pytest.raises(TransportError, match=r"here: CuPy finds no libnccl.*Accepted are auto"):
        mpistrat.Communicator(hierarchy)


def test_communicators_are_destroyed_in_one_order(comm, nodes, monkeypatch):
    sizes, num_inside = [], len(nodes.place(comm.rank).node.ranks)
    destroy = stand_in_nccl._Communicator.destroy
    monkeypatch.setattr(stand_in_nccl._Communicator, "destroy", lambda self: sizes.append(self.comm.size) or destroy(self))
    with Pair(comm, nodes):
        pass
    assert sizes == [comm.size, *([num_inside] if num_inside > 1 else [])]


def test_a_known_call_and_a_new_one_are_told_apart(comm, make_pair, nodes):
    """The ranks of one compare digests, those of the other texts."""
    pair = make_pair(nodes, STRICT="0")
    array = pair.up(values(100, np.float32, comm.rank))
    for _ in range(2):
        pair.gpu.all_reduce(SUM, array)
    calls = pair.library.calls.copy()
    with pytest.raises(AgreementError, match=r"ranks made different calls"):
        pair.gpu.all_reduce(SUM, array) if comm.rank != 3 else pair.gpu.broadcast(array)
    assert pair.library.calls == calls
    comm.Barrier()
