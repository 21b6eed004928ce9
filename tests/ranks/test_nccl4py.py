"""Collectives on GPUs that nccl4py binds to NCCL."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import ReduceOp
from mpistrat.topology.world import World
from tests.gpu.pair import Pair, values

SUM = ReduceOp.SUM


@pytest.fixture
def pair(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_INTER_TRANSPORT", "nccl")
    with Pair(comm, World.from_shape("1x2" if comm.size == 2 else "2x2"), nccl_by="nccl4py") as pair:
        yield pair


@pytest.mark.ranks(nodes=["1x2", "2x2"])
def test_collectives_give_what_they_give_on_the_host_and_say_by_what(pair):
    between = "" if pair.size == 2 else ", nccl by nccl4py between nodes"
    assert pair.gpu.path == f"nccl by nccl4py inside nodes{between}"
    many = [values(1000, np.float32, pair.rank), values((3, 5), np.int64, pair.rank), values(7, np.float16, pair.rank)]
    for options in (CommunicationOptions(), CommunicationOptions(deterministic=True)):
        for arrays in (many, many[:1], many[:1]):
            pair.compare(SUM, arrays, options)


@pytest.mark.ranks(nodes=["2x2"])
@pytest.mark.parametrize("is_direct", [True, False])
def test_what_mpi_is_to_send_lies_in_no_window(comm, monkeypatch, is_direct):
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "on" if is_direct else "off")
    with Pair(comm, World.from_shape("2x2"), nccl_by="nccl4py") as pair:
        assert ("cuda_aware between nodes" in pair.gpu.path) == is_direct
        pair.compare(SUM, [values(3000, np.float32, pair.rank)], CommunicationOptions(algorithm="hierarchical"))
        windows = pair.nccl._nccl._calls.windows
        assert len(windows) == (0 if is_direct else 1)
    assert not windows
