"""What a memory report says, and what malloc does with freed memory in a program that has a communicator."""

import os
import platform
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat import arrays
from mpistrat.arrays import new_array, retained_bytes
from mpistrat.execution.memory import MemoryReport

_PROGRAM = """
import ctypes
import numpy as np
from mpi4py import MPI
import mpistrat

mpistrat.Communicator(MPI.COMM_SELF)
# more than compiling modules, where no bytecode is kept, leaves at the top of the heap
arrays = np.ones(1 << 20), np.ones(1 << 20)  # a result that is new, and a buffer inside the call
# glibc writes the size of a block before it, and in its second bit whether the system has given it, and gets it back
print(*[ctypes.c_size_t.from_address(array.ctypes.data - 8).value >> 1 & 1 for array in arrays])
"""


def test_a_report_adds_up_and_is_one_line():
    report = MemoryReport(3, 8 << 20, 1 << 20, 1 << 20, 2, 4 << 20)
    assert (report.total_bytes, report.ratio) == (10 << 20, 2.5)
    assert str(report) == (
        "rank 3 holds 10 MiB: window 8 MiB, rails 1 MiB, plans 1 MiB (2 plans); 2.5 times its largest pack of 4 MiB"
    )
    with pytest.raises(AttributeError):
        report.rank = 4


def test_large_arrays_take_the_memory_of_earlier_ones_that_nobody_has():
    float32, bfloat16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
    first = new_array((9 << 20,), float32)
    assert (first.shape, first.dtype, first.flags.carray) == ((9 << 20,), float32, True)
    address, before = first.ctypes.data, retained_bytes()
    views = [first[5:], first.data, np.from_dlpack(first), first.reshape(2, -1).T]
    del first
    while views:  # each of them has the memory
        assert new_array((9 << 20,), float32).ctypes.data != address
        views.pop()
    assert retained_bytes() == before + (72 << 20)
    again = [new_array((2, 9 << 20), bfloat16), new_array((2, 9 << 20), bfloat16)]
    assert address in [array.ctypes.data for array in again]
    assert {array.dtype for array in again} == {bfloat16}
    assert again[0].ctypes.data != again[1].ctypes.data
    assert retained_bytes() == before


def test_no_more_than_256_mib_are_retained():
    arrays = [new_array((48 << 20,), np.dtype(np.uint8)) for _ in range(8)]
    assert len({array.ctypes.data for array in arrays}) == 8
    large = new_array((257 << 20,), np.dtype(np.uint8))
    del arrays, large
    assert retained_bytes() == 5 * 48 << 20


def test_one_replica_holds_nothing():
    strategy = mpistrat.OneDeviceStrategy()
    report = strategy.memory_report()
    assert (report.total_bytes, report.ratio, report.rank) == (0, 0.0, 0)
    strategy.close()
    with pytest.raises(RuntimeError, match="this strategy was closed"):
        strategy.memory_report()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
@pytest.mark.parametrize(("own", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_new_arrays_take_memory_that_was_freed_unless_malloc_is_set_otherwise(own, is_kept):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env={**environment, **own})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["0", "0"] if is_kept else ["1", "1"])


def test_a_finalizer_that_makes_an_array_meanwhile_gets_other_memory():
    retained, made = arrays._RetainedMemory(), []

    def finalizer():  # at the moment when it is looked whether the memory is in use
        if not made:
            made.append(None)
            made[0] = retained.block(8)

    retained._entries.append((np.empty(8, np.uint8), finalizer))
    block = retained.block(8)
    assert not np.may_share_memory(np.asarray(block), np.asarray(made[0]))
