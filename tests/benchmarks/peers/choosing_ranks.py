"""Our all-reduce with auto and with each algorithm by name, in one program: they share its memory, and so its luck with it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from ours import comm, communicator, is_right
from turns import Task, serve

import mpistrat
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp


@cache
def by_name(algorithm: str) -> Communicator:
    """Return the collectives of a program that always asks for this algorithm."""
    if algorithm == "auto":
        return communicator
    return Communicator(Hierarchy(comm, communicator.world), CommunicationOptions(algorithm=algorithm))


def all_reduce(request: dict[str, Any]) -> Task:
    """Sum one array of float32 by the ``algorithm`` said."""
    ops, source = by_name(request["algorithm"]), np.full(request["nbytes"] // 4, comm.rank + 1, np.float32)
    targets = [np.empty_like(source)]
    plan = ops.choose(source.size, source.dtype).plan.algorithm
    run = lambda: ops.all_reduce(ReduceOp.SUM, [source], None, targets)  # noqa: E731
    return Task(run, lambda: is_right(targets), comm.Barrier, {"plan": plan})


if __name__ == "__main__":
    serve(comm.rank, {"mpistrat": mpistrat.__version__}, {"all_reduce": all_reduce})
