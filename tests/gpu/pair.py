"""The same collectives on a stand-in device and in host memory, which is the oracle."""

import threading

import numpy as np

from mpistrat.communicator.communicator import Communicator
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from tests.gpu.bound import stand_in


class Pair:
    """The same collectives on a device and in host memory."""

    def __init__(self, comm, world, has_nccl=True, nccl_by="CuPy"):
        self.comm, self.world, self.how = comm, world, (has_nccl, nccl_by)

    def __enter__(self):
        self.bound = stand_in(self.comm, *self.how)
        self.device = self.bound.__enter__()
        self.gpu = Communicator(Hierarchy(self.comm, self.world))
        self.host = Communicator(Hierarchy(self.comm, self.world), uses_gpu=False)
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


def values(shape, dtype, seed, op=ReduceOp.SUM):
    small = np.random.default_rng(seed).integers(1 if op is ReduceOp.PROD else -4, 3, shape)
    return (np.abs(small) if np.dtype(dtype).kind == "u" else small).astype(dtype)
