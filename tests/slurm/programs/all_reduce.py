"""Rank program: reduce, and let rank 0 say on which nodes, and whether the sum is right."""

import os

import numpy as np

import mpistrat
from mpistrat.launch.bootstrap import start
from mpistrat.topology.discover import discover

strategy = mpistrat.MultiWorkerMirroredStrategy()
comm = start()
world = discover(comm)
total = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", np.full(1000, comm.rank + 1.0)))
right = bool((strategy.experimental_local_results(total)[0] == comm.size * (comm.size + 1) // 2).all())
if comm.rank == 0:
    nodes = "+".join(f"{node.name}:{len(node.ranks)}" for node in world.nodes)
    print(f"{world.size} ranks on {nodes}, sum right: {right}, GPUs: {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
