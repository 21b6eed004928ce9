"""A rank that computes on a stand-in device: kernels built once on a machine, the device bound, NCCL stood in for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from mpistrat.settings import VIRTUAL_NODES
from tests.gpu import on_host, sanitizer
from tests.gpu.fake_nccl4py import bound_by
from tests.gpu.stand_in import StandInDevice
from tests.gpu.stand_in_arrays import stand_in_gpu
from tests.gpu.stand_in_nccl import StandInNccl

TRIAL_BYTES = (1 << 9, 1 << 10)  # the stand-in sums on the host


@contextmanager
def stand_in(comm: Any, has_nccl: bool = True, nccl_by: str = "CuPy", nodes: str = "") -> Iterator[StandInDevice]:
    """Bind a stand-in device, each rank to its own, and an NCCL for any ranks, by CuPy or nccl4py. A collective call.

    A shape of virtual nodes is that of strategies which are made meanwhile.
    """
    if on_host.missing():
        pytest.skip(on_host.missing())
    with pytest.MonkeyPatch.context() as patch, stand_in_gpu(comm.rank, comm.rank % 2) as device:
        device.kernels = all_kernels(comm)
        library = StandInNccl(device, comm)
        library.available = has_nccl
        bound = bound_by(library, nccl_by)
        patch.setattr("mpistrat.transports.nccl.find_binding", lambda: bound)
        patch.setattr("mpistrat.transports.nccl.TRIAL_BYTES", TRIAL_BYTES)
        if nodes:
            patch.setenv(VIRTUAL_NODES.name, nodes)
        yield device


def all_kernels(comm: Any) -> on_host.HostKernels:
    """Return every kernel that a collective may launch, built where no test before has built them. A collective call."""
    names = sanitizer.kernels()
    folder = Path(tempfile.gettempdir()) / f"mpistrat-host-kernels-{crc32(on_host.source(names).encode()):08x}"
    if comm.rank == 0 and not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as building:
            built = Path(building) / "built"
            built.mkdir()
            on_host.HostKernels.build(built, names)
            try:
                built.rename(folder)
            except OSError:
                assert folder.exists()  # another session was faster
    comm.Barrier()
    return on_host.HostKernels(folder, names)
