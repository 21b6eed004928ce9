"""InputOptions: how a dataset is sharded, prefetched and copied to the replicas; and what its makers are told of these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from mpistrat.communicator.validate import checked_index, checked_int
from mpistrat.errors import InvalidArgumentError

SHARD_HINT = -1
"""Stands in ``dataset.shard(SHARD_HINT, SHARD_HINT)`` for the numbers of each input pipeline; see `AutoShardPolicy.HINT`."""


class AutoShardPolicy(Enum):
    """Which part of a dataset of global batches each input pipeline reads. Every rank is an input pipeline.

    ======  ==============================================================================================================
    policy  what a replica sees
    ======  ==============================================================================================================
    AUTO    as FILE where the dataset is a `FileDataset`, else as DATA
    DATA    its rows of every global batch: all ranks must iterate over the same batches
    FILE    every num_replicas_in_sync-th file, batched as with OFF
    OFF     every row, in batches of a replica's size: each rank may iterate over other data
    HINT    the shard that ``dataset.shard(SHARD_HINT, SHARD_HINT)`` stands for, batched as with OFF
    ======  ==============================================================================================================

    With OFF, FILE and HINT the batches of an `ArrayDataset`, `MapDataset` or `FileDataset` are rebatched across their
    bounds, so that only the last one of an epoch is short. Batches of other iterables, of unknown size, are split one by one.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(Enum):
    """The number of input pipelines. One rank is one replica, so both mean one pipeline per rank."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """How a dataset is sharded, prefetched and copied to the replicas.

    Attributes
    ----------
    experimental_fetch_to_device : bool, optional
        Whether elements are prefetched to the replica's device; None means True. On a GPU arrays of the host
        become arrays of CuPy there, tensors of PyTorch tensors there; False leaves all where they are. Replicas on CPUs work
        in host memory, where elements are anyway.
    experimental_replication_mode : InputReplicationMode
        PER_REPLICA is accepted by ``MirroredStrategy.distribute_datasets_from_function`` only.
    experimental_place_dataset_on_device : bool
        Whether the dataset itself is on the replica's device; only with PER_REPLICA and without fetching. Datasets are in host
        memory, so that replicas on GPUs refuse it.
    experimental_per_replica_buffer_size : int
        Elements that a thread prefetches while the step runs; with 0 each is read when it is asked for.
    auto_shard_policy : AutoShardPolicy
        Which part of the dataset each rank reads, for `experimental_distribute_dataset`.
    virtual_replicas : int, optional
        Into how many equal parts `ReplicaContext.sum_of_parts` cuts global batches, for `experimental_distribute_dataset` with
        ``AutoShardPolicy.DATA``: each rank gets the rows of whole parts. At most 65536. Not in TensorFlow.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    virtual_replicas: int | None = None

    def __post_init__(self) -> None:
        self._check_type("experimental_fetch_to_device", bool, type(None))
        self._check_type("experimental_replication_mode", InputReplicationMode)
        self._check_type("experimental_place_dataset_on_device", bool)
        self._check_type("auto_shard_policy", AutoShardPolicy)
        checked_int(self.experimental_per_replica_buffer_size, "experimental_per_replica_buffer_size", 0)
        if self.virtual_replicas is not None:
            checked_int(self.virtual_replicas, "virtual_replicas", 1)
        if not self.experimental_place_dataset_on_device:
            return
        if self.experimental_replication_mode is not InputReplicationMode.PER_REPLICA:
            raise InvalidArgumentError(
                "experimental_place_dataset_on_device=True needs experimental_replication_mode="
                f"InputReplicationMode.PER_REPLICA; got {self.experimental_replication_mode.name}"
            )
        if self.experimental_fetch_to_device is not False:
            raise InvalidArgumentError(
                "experimental_place_dataset_on_device=True leaves nothing to fetch: it needs experimental_fetch_to_device="
                f"False; got {self.experimental_fetch_to_device}, and None means True"
            )

    def _check_type(self, field: str, *accepted: type) -> None:
        value = getattr(self, field)
        if not isinstance(value, accepted):
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in accepted)
            raise TypeError(f"{field} must be {names}; got {value!r}")


@dataclass(frozen=True)
class InputContext:
    """The input pipeline that a function makes, and the number of replicas that all pipelines feed.

    Attributes
    ----------
    num_input_pipelines : int
        Number of pipelines.
    input_pipeline_id : int
        Index of this pipeline, from 0.
    num_replicas_in_sync : int
        Number of replicas.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        checked_int(self.num_replicas_in_sync, "num_replicas_in_sync", 1)
        pipelines = checked_int(self.num_input_pipelines, "num_input_pipelines", 1)
        checked_index(self.input_pipeline_id, "input_pipeline_id", pipelines)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows in the batch of each replica, of which the global batch size must be a multiple."""
        share, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise InvalidArgumentError(
                f"global_batch_size {global_batch_size} is not divisible by {self.num_replicas_in_sync} replicas; "
                f"{global_batch_size - rest} and {global_batch_size - rest + self.num_replicas_in_sync} are"
            )
        return share


@dataclass(frozen=True)
class ValueContext:
    """The replica that a value is made for, and the number of replicas."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        replicas = checked_int(self.num_replicas_in_sync, "num_replicas_in_sync", 1)
        checked_index(self.replica_id_in_sync_group, "replica_id_in_sync_group", replicas)


def read_options(options: Any) -> InputOptions:
    """Return the options, or the default ones for None."""
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"options must be mpistrat.InputOptions or None; got {type(options).__name__}")
    return options
