"""Collectives of arrays on GPUs, on a stand-in device whose streams dawdle; the host path is the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.cross_device.hierarchical import HierarchicalCollectives
from mpistrat.cross_device.on_device import DeviceCollectives
from mpistrat.errors import TransportError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from tests.gpu.bound import stand_in
from tests.launches import needs_ranks

SUM = ReduceOp.SUM


@pytest.fixture
def device(comm, world):
    with stand_in(comm, world) as device:
        yield device


@pytest.fixture
def gpu(comm, world, device):
    collectives = DeviceCollectives(Hierarchy(comm, world), device)
    yield collectives
    collectives.close()


@pytest.fixture
def host(comm, world, device):
    collectives = HierarchicalCollectives(Hierarchy(comm, world))
    yield collectives
    collectives.close()


@pytest.fixture
def aware(comm, world, device, monkeypatch):
    """Give collectives whose MPI takes device memory: it can read the stand-in's."""
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "on")
    monkeypatch.setattr("mpistrat.execution.executor.RING_FROM_BYTES", 64)
    collectives = DeviceCollectives(Hierarchy(comm, world), device)
    yield collectives
    collectives.close()


def up(device, array):
    return device.array_module.asarray(array)


def values(shape, dtype, seed):
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(dtype)


def test_a_sum_of_device_arrays(gpu, host, device):
    arrays = [values(shape, np.float32, gpu.rank) for shape in ((5, 3), (0,), (), (70_000,))]
    expected = host.all_reduce(SUM, arrays)
    for _ in range(3):
        found = gpu.all_reduce(SUM, [up(device, array) for array in arrays])
        for one, other in zip(found, expected, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_array_equal(device.get(one), other)


def test_a_sum_by_an_mpi_that_takes_device_memory(aware, host, device, world):
    arrays = [values(shape, np.float32, aware.rank) for shape in ((5, 3), (70_000,))]
    expected = host.all_reduce(SUM, arrays)
    for _ in range(2):
        found = aware.all_reduce(SUM, [up(device, array) for array in arrays])
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(device.get(one), other)
    assert ("cuda_aware between nodes" in aware.path) == (world.num_nodes > 1)


def test_what_goes_by_way_of_the_host_is_said_once(comm, world, device, monkeypatch, tmp_path, capsys):
    """Nobody's MPI takes memory of GPUs here, and says so."""
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "auto")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("mpistrat.execution.device_rails._said", set())
    for _ in range(2):
        collectives = DeviceCollectives(Hierarchy(comm, world), device)
        collectives.close()
    said = capsys.readouterr().err
    assert said.count("memory of GPUs goes between nodes by way of the host: ") == (world.num_nodes > 1 and comm.rank == 0)
    if world.num_nodes > 1:
        assert "staged over mpi_ring between nodes (" in collectives.path


@needs_ranks(2)
def test_wrong_values_from_an_mpi_that_was_named_are_raised_on_all(comm, world, device, monkeypatch):
    if world.num_nodes == 1:
        pytest.skip("nothing goes between nodes")
    monkeypatch.setenv("MPISTRAT_MPI_GPU", "on")
    wrong = "planted: wrong values" if comm.rank == comm.size - 1 else ""
    monkeypatch.setattr("mpistrat.transports.cuda_aware.CudaAwareRing.first_exchange", lambda self: wrong)
    hierarchy = Hierarchy(comm, world)
    with pytest.raises(TransportError, match="planted: wrong values, and MPISTRAT_MPI_GPU=on was set"):
        DeviceCollectives(hierarchy, device)
    hierarchy.close()
