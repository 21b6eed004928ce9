"""Bytes that two servers of ours get, of variables as a model has them; the chief prints them for each placement."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

import mpistrat
from mpistrat.experimental import ParameterServerStrategy

LAYERS = ((32, 512), (512, 512), (512, 512), (512, 512), (512, 10))  # with a bias each
SHAPES = ((50_000, 32), *(shape for rows, columns in LAYERS for shape in ((rows, columns), (columns,))))


def main(coordinator: Any) -> tuple[int, ...]:
    """Make the variables, and return the bytes of each server."""
    with coordinator.strategy.scope():
        kept = [mpistrat.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    found = tuple(coordinator.strategy.extended.server_bytes)
    assert sum(found) == sum(one.nbytes for one in kept)
    return found


if __name__ == "__main__":
    resolver = mpistrat.cluster_resolver.MPIClusterResolver(chief=1, ps=2)
    partitioner = mpistrat.experimental.partitioners.MinSizePartitioner(max_shards=2)
    ways = {"even_bytes": partitioner, "round_robin": None}
    found = {name: ParameterServerStrategy.main(main, resolver, way, placement=name) for name, way in ways.items()}
    if resolver.task_type == "chief":
        print(json.dumps(found))
