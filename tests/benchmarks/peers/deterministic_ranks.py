"""One rank of the experiment on deterministic mode: sum the same values on virtual nodes of several shapes; print digests."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import ReduceOp

COUNT = 1_000_000


def main() -> None:
    """Sum on nodes of each shape in ``sys.argv[1]`` with each of the options in ``sys.argv[2]``, in JSON both."""
    shapes, kinds = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    found = {shape: _digests(shape, kinds) for shape in shapes}
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found))


def _digests(shape: str, kinds: dict[str, dict[str, Any]]) -> dict[str, str]:
    os.environ["MPISTRAT_VIRTUAL_NODES"] = shape
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    ops = strategy.extended.communicator
    values = np.random.default_rng(ops.rank).normal(size=COUNT).astype(np.float32)
    sums = {name: ops.all_reduce(ReduceOp.SUM, [values], CommunicationOptions(**fields))[0] for name, fields in kinds.items()}
    strategy.close()
    return {name: hashlib.sha256(total.tobytes()).hexdigest() for name, total in sums.items()}


if __name__ == "__main__":
    main()
