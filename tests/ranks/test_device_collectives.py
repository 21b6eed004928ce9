"""Collectives of arrays on GPUs, on a stand-in device whose streams dawdle; the host path is the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.cross_device.hierarchical import HierarchicalCollectives
from mpistrat.cross_device.on_device import DeviceCollectives
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from tests.gpu.bound import stand_in

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
