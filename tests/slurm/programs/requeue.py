"""Rank program: count steps until the job is told to end, and go on from there; rank 0 says where it begins and ends."""

import sys
import time

import numpy as np

import mpistrat
from mpistrat.experimental import PreemptionCheckpointHandler
from mpistrat.launch.bootstrap import start
from mpistrat.topology.discover import discover

STEPS = int(sys.argv[1])

strategy = mpistrat.MultiWorkerMirroredStrategy()
world = discover(start())
with strategy.scope():
    total = mpistrat.Variable(np.zeros(1000))
    manager = mpistrat.CheckpointManager(mpistrat.Checkpoint(total=total), "saved")
    handler = PreemptionCheckpointHandler(None, manager)


def step() -> None:
    """Count with all ranks."""
    time.sleep(0.05)
    one = mpistrat.get_replica_context().all_reduce("mean", np.ones(1000))
    mpistrat.get_replica_context().update(total, lambda value, more: value + more, (one,))


if strategy.is_chief:
    print(f"{world.size} ranks on {len(world.nodes)} nodes begin at step {handler.total_run_calls}", flush=True)
while handler.total_run_calls < STEPS:
    handler.run(strategy.run, step)
manager.close()
if strategy.is_chief:
    print(f"all {STEPS} steps counted: {bool((total.numpy() == STEPS).all())}", flush=True)
