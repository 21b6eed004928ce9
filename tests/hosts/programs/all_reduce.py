"""Rank program: try all verbs, count what the hosts send; rank 0 writes what it found as JSON.

Argument: the file to write.
"""

import json
import sys
from pathlib import Path

import numpy as np

import mpistrat
from mpistrat.launch.bootstrap import start
from mpistrat.topology.discover import discover
from tests.gpu import verbs_rank
from tests.hosts.lab import parse_bytes_sent

BUFFER_BYTES = 16 << 20
REPEATS = 2

comm = start().Dup()
strategy = mpistrat.MultiWorkerMirroredStrategy()
verbs_rank.SHAPES, verbs_rank.DTYPES = verbs_rank.SMALL_SHAPES, ("float32", "int16", "complex64")  # the links are slow


def bytes_sent() -> int:
    """Return what this host has sent until every rank has come here."""
    comm.Barrier()
    return parse_bytes_sent(Path("/proc/self/net/dev").read_text())


def bytes_per_all_reduce() -> float:
    """Return what this host sends for one all-reduce of the large buffer, beyond what two barriers send."""
    buffer = np.ones(BUFFER_BYTES // 4, np.float32)
    all_reduce = lambda array: strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", array))  # noqa: E731
    all_reduce(buffer)  # connections are made, plans chosen, memory bound
    first, idle = bytes_sent(), bytes_sent()
    for _ in range(REPEATS):
        all_reduce(buffer)
    return (bytes_sent() - idle - (idle - first)) / REPEATS


world = discover(comm)
compared = verbs_rank.check(strategy)["compared"]
sent = comm.allgather(bytes_per_all_reduce())
if comm.rank == 0:
    nodes = {node.name: list(node.ranks) for node in world.nodes}
    by_node = {node.name: sent[node.ranks[0]] for node in world.nodes}
    found = {"nodes": nodes, "compared": compared, "bytes_per_all_reduce": by_node, "buffer_bytes": BUFFER_BYTES}
    Path(sys.argv[1]).write_text(json.dumps(found))
