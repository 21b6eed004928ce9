"""Rank program: reduce values of every dtype, count what the hosts send; rank 0 writes what it found as JSON.

Argument: the file to write.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

import mpistrat
from mpistrat.launch.bootstrap import start
from mpistrat.topology.discover import discover
from tests.hosts.lab import parse_bytes_sent

DTYPES = [
    *(np.dtype(name) for name in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")),
    *(np.dtype(name) for name in ("float16", "float32", "float64", "complex64", "complex128")),
    np.dtype(ml_dtypes.bfloat16),
]
COUNTS = (0, 1, 1000, 100_003)
BUFFER_BYTES = 16 << 20
REPEATS = 4

comm = start().Dup()
strategy = mpistrat.MultiWorkerMirroredStrategy()


def all_reduce(array: np.ndarray) -> np.ndarray:
    """Sum over all ranks, as a user does; of booleans, which have no sum, take the maximum."""
    op = "max" if array.dtype == bool else "sum"
    total = strategy.run(lambda: mpistrat.get_replica_context().all_reduce(op, array))
    return strategy.experimental_local_results(total)[0]


def contribution(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Return small whole numbers, which every dtype holds and sums exactly; some are negative where it can be."""
    numbers = (np.arange(count) + rank) % 7 - (2 if dtype.kind in "ifc" else 0)
    values = numbers.astype(dtype)
    return values * dtype.type(1 + 1j) if dtype.kind == "c" else values


def is_exact(count: int, dtype: np.dtype) -> bool:
    """Return whether the sum has the very bits it must have, and the input is as it was."""
    mine = contribution(comm.rank, count, dtype)
    before = mine.copy()
    total = all_reduce(mine)
    expected = contribution(0, count, dtype)
    for rank in range(1, comm.size):
        expected = expected + contribution(rank, count, dtype)
    same_input = mine.tobytes() == before.tobytes()
    return bool(same_input and total.dtype == dtype and total.tobytes() == expected.astype(dtype).tobytes())


def bytes_sent() -> int:
    """Return what this host has sent until every rank has come here."""
    comm.Barrier()
    return parse_bytes_sent(Path("/proc/self/net/dev").read_text())


def bytes_per_all_reduce() -> float:
    """Return what this host sends for one all-reduce of the large buffer, beyond what two barriers send."""
    buffer = np.ones(BUFFER_BYTES // 4, np.float32)
    all_reduce(buffer)  # connections are made, plans chosen, memory bound
    first, idle = bytes_sent(), bytes_sent()
    for _ in range(REPEATS):
        all_reduce(buffer)
    return (bytes_sent() - idle - (idle - first)) / REPEATS


world = discover(comm)
wrong = [f"{dtype.name} ({count},)" for dtype in DTYPES for count in COUNTS if not is_exact(count, dtype)]
wrong_anywhere = sorted({name for names in comm.allgather(wrong) for name in names})
sent = comm.allgather(bytes_per_all_reduce())
if comm.rank == 0:
    Path(sys.argv[1]).write_text(
        json.dumps(
            {
                "nodes": {node.name: list(node.ranks) for node in world.nodes},
                "wrong": wrong_anywhere,
                "bytes_per_all_reduce": {node.name: sent[node.ranks[0]] for node in world.nodes},
                "buffer_bytes": BUFFER_BYTES,
            }
        )
    )
