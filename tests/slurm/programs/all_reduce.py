"""Rank program: reduce with every suitable algorithm, and let rank 0 say on which nodes, and whether all sums are right."""

import os

import numpy as np

import mpistrat
from mpistrat.algorithms.planners import PLANNERS
from mpistrat.launch.bootstrap import start
from mpistrat.topology.discover import discover

COUNT = 100_003

strategy = mpistrat.MultiWorkerMirroredStrategy()
comm = start()
world = discover(comm)


def is_right(algorithm: str) -> bool:
    """Sum over all ranks, as a user does."""
    options = mpistrat.experimental.CommunicationOptions(algorithm=algorithm)
    mine = np.full(COUNT, comm.rank + 1.0)
    total = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", mine, options))
    return bool((strategy.experimental_local_results(total)[0] == comm.size * (comm.size + 1) // 2).all())


right = all(comm.allgather(all([is_right(algorithm) for algorithm in PLANNERS])))
if comm.rank == 0:
    nodes = "+".join(f"{node.name}:{len(node.ranks)}" for node in world.nodes)
    print(f"{world.size} ranks on {nodes}, sum right: {right}, GPUs: {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
