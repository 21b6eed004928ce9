"""InputContext and ValueContext: the input pipeline, or the replica, for which a user's function is called."""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat.errors import InvalidArgumentError


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

    Raises
    ------
    InvalidArgumentError
        If there are no pipelines or no replicas, or the id is out of range.
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
        """Return the number of rows in the batch of each replica.

        Raises
        ------
        InvalidArgumentError
            If the global batch size is not divisible by the number of replicas.
        """
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
        if self.num_replicas_in_sync < 1:
            raise InvalidArgumentError(f"num_replicas_in_sync must be at least 1; got {self.num_replicas_in_sync}")
        if not 0 <= self.replica_id_in_sync_group < self.num_replicas_in_sync:
            accepted = f"0 to {self.num_replicas_in_sync - 1}"
            raise InvalidArgumentError(
                f"replica_id_in_sync_group must be one of {accepted}; got {self.replica_id_in_sync_group}"
            )
