"""Which plans are kept: the same on all ranks, whichever way their calls go."""

from __future__ import annotations

import numpy as np

from mpistrat.communicator.communicator import Communicator
from mpistrat.groups.hierarchy import Hierarchy


def test_all_ranks_forget_the_same_plan_whichever_of_them_use_it(comm, world, monkeypatch):
    monkeypatch.setattr("mpistrat.communicator.plan_cache.BATCHES_KEPT", 3)
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    ops = Communicator(Hierarchy(comm, world))
    ops.timeline.enabled = comm.rank == 0  # it looks its plans up, where the others take their fast paths
    for count in (1, 2, 3, 1, 4, 1, 2, 5, 4, 1):
        assert ops.all_reduce("sum", np.ones(count)).tolist() == [ops.size] * count
        kept = [[shape for shape, _ in plan[-1:]] for plan in ops._plans._plans]
        assert comm.allgather(kept) == [kept] * comm.size
    assert kept == [[(5,)], [(4,)], [(1,)]]
    ops.close()
