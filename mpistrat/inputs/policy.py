"""What each AutoShardPolicy means: which part of a dataset an input pipeline reads, and how its batches are cut."""

from __future__ import annotations

from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.base import Dataset
from mpistrat.inputs.options import AutoShardPolicy

__all__ = ["part_of"]

OFF, AUTO, FILE, DATA, HINT = AutoShardPolicy


def part_of(dataset: Dataset, policy: AutoShardPolicy, pipeline: int, num_pipelines: int) -> tuple[Dataset, AutoShardPolicy]:
    """Return what an input pipeline reads, and whether it takes its share of each batch (DATA) or all its rows (OFF).

    Raises
    ------
    InvalidArgumentError
        If FILE is to shard what is no `FileDataset`, or one of fewer files than pipelines; or HINT a dataset without the
        marker `SHARD_HINT`, which no other policy accepts.
    """
    if policy is AUTO:
        policy = FILE if dataset.is_file_based else DATA
    if dataset.is_hinted and policy is not HINT:
        raise InvalidArgumentError(
            f"the dataset was sharded by SHARD_HINT, which waits for auto_shard_policy=AutoShardPolicy.HINT; got {policy.name}"
        )
    if policy is HINT:
        return _hinted_part(dataset, pipeline, num_pipelines), OFF
    if policy is FILE:
        return _files(dataset, pipeline, num_pipelines), OFF
    return dataset, policy


def _hinted_part(dataset: Dataset, pipeline: int, num_pipelines: int) -> Dataset:
    if not dataset.is_hinted:
        raise InvalidArgumentError(
            f"AutoShardPolicy.HINT puts numbers in place of SHARD_HINT, and {dataset!r} was not sharded by it.\n"
            "    incorrect:  strategy.experimental_distribute_dataset(dataset, options)\n"
            "    correct:    strategy.experimental_distribute_dataset(dataset.shard(SHARD_HINT, SHARD_HINT), options)"
        )
    return dataset.settled(num_pipelines, pipeline)


def _files(dataset: Dataset, pipeline: int, num_pipelines: int) -> Dataset:
    if not dataset.is_file_based:
        raise InvalidArgumentError(
            f"AutoShardPolicy.FILE shares files between ranks, and {dataset!r} has none; use AutoShardPolicy.DATA for it, or a "
            "mpistrat.FileDataset"
        )
    return dataset.shard(num_pipelines, pipeline)
