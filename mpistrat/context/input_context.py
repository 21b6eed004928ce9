"""InputContext and ValueContext: what a function that makes a dataset or a value is told about its place."""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat.errors import InvalidArgumentError

__all__ = ["InputContext", "ValueContext"]


@dataclass(frozen=True)
class InputContext:
    """Which input pipeline is being made, and for how many replicas.

    Attributes
    ----------
    num_input_pipelines : int
        Pipelines that feed the replicas together.
    input_pipeline_id : int
        The number of this one.
    num_replicas_in_sync : int
        Replicas that are fed.

    Raises
    ------
    InvalidArgumentError
        If there are no pipelines or no replicas, or the id is not that of a pipeline.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name in ("num_input_pipelines", "num_replicas_in_sync"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            accepted = f"0 to {self.num_input_pipelines - 1}"
            raise InvalidArgumentError(f"input_pipeline_id must be one of {accepted}; got {self.input_pipeline_id}")

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows of each replica's batch.

        Raises
        ------
        InvalidArgumentError
            If the global batch does not divide evenly.
        """
        share, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise InvalidArgumentError(
                f"global_batch_size {global_batch_size} does not divide by {self.num_replicas_in_sync} replicas; "
                f"{global_batch_size - rest} and {global_batch_size - rest + self.num_replicas_in_sync} do"
            )
        return share


@dataclass(frozen=True)
class ValueContext:
    """Which replica a value is being made for, and of how many.

    Attributes
    ----------
    replica_id_in_sync_group : int
        The number of the replica.
    num_replicas_in_sync : int
        How many replicas there are.

    Raises
    ------
    InvalidArgumentError
        If there are no replicas, or the id is not that of a replica.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if self.num_replicas_in_sync < 1:
            raise InvalidArgumentError(f"num_replicas_in_sync must be at least 1; got {self.num_replicas_in_sync}")
        if not 0 <= self.replica_id_in_sync_group < self.num_replicas_in_sync:
            accepted = f"0 to {self.num_replicas_in_sync - 1}"
            raise InvalidArgumentError(
                f"replica_id_in_sync_group must be one of {accepted}; got {self.replica_id_in_sync_group}"
            )
