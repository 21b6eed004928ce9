"""A rank that computes on a stand-in device, with kernels and an NCCL, and the same collectives in host memory, the oracle."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import mpistrat
from mpistrat.groups.hierarchy import Hierarchy
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


class Pair:
    """The same collectives on a device and in host memory."""

    def __init__(self, comm, world, has_nccl=True, nccl_by="CuPy"):
        self.comm, self.world, self.how = comm, world, (has_nccl, nccl_by)

    def __enter__(self):
        self.bound = stand_in(self.comm, *self.how)
        self.device = self.bound.__enter__()
        self.gpu = mpistrat.Communicator(Hierarchy(self.comm, self.world))
        self.host = mpistrat.Communicator(Hierarchy(self.comm, self.world), uses_gpu=False)
        self.rank, self.size, self.download = self.gpu.rank, self.gpu.size, self.device.get
        executor = self.gpu._gpu.executor
        self.nccl = executor.transports.everywhere or executor.intra
        self.library = getattr(self.nccl, "_nccl", None)
        return self

    def __exit__(self, *error):
        if error[0] is None:
            self.gpu.close()
            self.host.close()
        self.bound.__exit__(*error)

    def hold(self, stream, seconds):
        """Let a stream get on no further for so many seconds; return the timer."""
        self.device.held = stream
        release = threading.Timer(seconds, setattr, (self.device, "held", None))
        release.start()
        return release

    def up(self, array):
        return self.device.array_module.asarray(array)

    def reduce(self, op, arrays, *options):
        """Reduce copies on the device."""
        return self.gpu.all_reduce(op, list(map(self.up, arrays)), *options)

    def compare(self, op, arrays, *options):
        """Reduce in host memory and on the device; the values are such that every order of combining gives the same bits.

        On the device last: streams get on only while ranks poll, and a rank in a call of the host does not.
        """
        expected = self.host.all_reduce(op, arrays, *options)
        self.check(self.reduce(op, arrays, *options), expected)

    def check(self, found, expected):
        """Compare an array of the device, or a list of them, with what it should be."""
        for one, wanted in zip(*(each if isinstance(each, list) else [each] for each in (found, expected)), strict=True):
            got = self.download(one)
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_array_equal(got, wanted)


def values(shape, dtype, seed, op=mpistrat.ReduceOp.SUM):
    small = np.random.default_rng(seed).integers(1 if op is mpistrat.ReduceOp.PROD else -4, 3, shape)
    return (np.abs(small) if np.dtype(dtype).kind == "u" else small).astype(dtype)
