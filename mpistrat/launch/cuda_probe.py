"""The CUDA-awareness probe: sends device memory to itself by MPI. A separate program, because it may crash."""

from __future__ import annotations

import sys

__all__ = ["AWARE", "WRONG_VALUES", "main"]

AWARE, WRONG_VALUES = 0, 3
"""Exit codes."""

_COUNTS = (1 << 10, 1 << 21)  # MPI sends short and long messages by different protocols, eager and rendezvous


def main(device_index: int) -> int:
    """Return whether MPI transfers device memory correctly, as an exit code."""
    import cupy

    cupy.cuda.Device(device_index).use()
    from mpi4py import MPI

    for count in _COUNTS:
        source = cupy.arange(count, dtype="float32")
        target = cupy.zeros(count, dtype="float32")
        cupy.cuda.get_current_stream().synchronize()
        message, landing = (
            [MPI.buffer.fromaddress(array.data.ptr, array.nbytes), array.nbytes, MPI.BYTE] for array in (source, target)
        )
        request = MPI.COMM_SELF.Irecv(landing, 0)
        MPI.COMM_SELF.Send(message, 0)
        request.Wait()
        if not bool((source == target).all()):
            return WRONG_VALUES
    return AWARE


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
