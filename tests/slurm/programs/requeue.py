"""Rank program: count steps until the job is told to end, and ten more in the next run; rank 0 says where each begins."""

import math
import time

import numpy as np

import mpistrat
from mpistrat.launch.bootstrap import start
from mpistrat.topology.discover import discover

MORE_STEPS = 10

strategy = mpistrat.MultiWorkerMirroredStrategy()
world = discover(start())
with strategy.scope():
    total = mpistrat.Variable(np.zeros(1000))
    manager = mpistrat.CheckpointManager(mpistrat.Checkpoint(total=total), "saved")
    handler = mpistrat.experimental.PreemptionCheckpointHandler(None, manager)


def step() -> None:
    """Count with all ranks."""
    time.sleep(0.05)
    one = mpistrat.get_replica_context().all_reduce("mean", np.ones(1000))
    mpistrat.get_replica_context().update(total, lambda value, more: value + more, (one,))


begun = handler.total_run_calls
if strategy.is_chief:
    print(f"{world.size} ranks on {len(world.nodes)} nodes begin at step {begun}", flush=True)
while handler.total_run_calls < (begun + MORE_STEPS if begun else math.inf):
    handler.run(strategy.run, step)
manager.close()
if strategy.is_chief:
    steps = handler.total_run_calls
    print(f"all {steps} steps counted: {bool((total.numpy() == steps).all())}", flush=True)
