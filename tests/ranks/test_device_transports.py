"""Transports of device memory, on a stand-in device whose streams dawdle."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from mpistrat.device.kernels import fold_kernel
from mpistrat.errors import TransportError
from mpistrat.groups.group import Group
from mpistrat.testing.transport_cases import DTYPES, operations
from mpistrat.testing.transport_suite import check_transport
from mpistrat.transports.cuda_ipc import CudaIpcTransport
from mpistrat.transports.staged import StagedTransport
from tests.gpu import on_host
from tests.gpu.stand_in import StandInDevice
from tests.launches import needs_ranks

CHUNK_BYTES = {"many chunks": 4096, "one chunk": 1 << 22}


@pytest.fixture
def group(comm):
    group = Group(comm.Dup(), "world", tuple(range(comm.size)))
    yield group
    group.close()


@pytest.fixture
def device(comm):
    device = StandInDevice(comm.rank)
    yield device
    device.close()


@pytest.fixture(scope="module")
def kernels(comm, tmp_path_factory):
    """Build the sums that the conformance kit asks for: once, on rank 0."""
    if on_host.missing():
        pytest.skip(on_host.missing())
    folds = sorted({fold_kernel(dtype, op) for dtype in DTYPES for op in operations(dtype)})
    folder = comm.bcast(str(tmp_path_factory.mktemp("kernels")))
    if comm.rank == 0:
        on_host.HostKernels.build(Path(folder), [], folds)
    comm.Barrier()
    return on_host.HostKernels(Path(folder), folds)


@pytest.mark.parametrize("chunks", CHUNK_BYTES)
def test_staged_passes_the_kit(group, device, chunks):
    make = partial(StagedTransport, device=device, chunk_bytes=CHUNK_BYTES[chunks])
    assert check_transport(make, group, ("reduce", "broadcast")) > 500


def test_cuda_ipc_passes_the_kit(group, device, kernels):
    device.kernels = kernels
    assert check_transport(partial(CudaIpcTransport, device=device), group) > 500


@needs_ranks(2)
def test_memory_that_one_rank_cannot_reach_is_refused_on_all(group, device):
    device.is_isolated = group.rank == group.size - 1
    with pytest.raises(TransportError, match=f"world: rank {group.size - 1}: planted: no way to the peer"):
        CudaIpcTransport(group, device).allocate(64)
