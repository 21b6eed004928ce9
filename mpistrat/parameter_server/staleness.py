"""StalenessReport: how many updates the reads of workers have lacked."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mpistrat.parameter_server.client import here
from mpistrat.text import format_table

__all__ = ["StalenessReport", "staleness_here"]


@dataclass(frozen=True)
class StalenessReport:
    """How many updates the reads of workers have lacked. `ClusterCoordinator.staleness_report` returns one.

    Each shard of a variable that is read counts as one read. Reads by a strategy without a bound are not counted.

    Attributes
    ----------
    max_staleness : int or None
        The bound.
    by_worker : tuple of dict
        For each worker, from a number of updates to that of the reads which have lacked so many; empty for one that is lost.
    """

    max_staleness: int | None
    by_worker: tuple[dict[int, int], ...]

    @property
    def histogram(self) -> dict[int, int]:
        """The sum over all workers, in ascending order."""
        total: Counter[int] = Counter()
        for one in self.by_worker:
            total.update(one)
        return dict(sorted(total.items()))

    def __str__(self) -> str:
        if self.max_staleness is None:
            return "max_staleness=None: each read asks the server, and none is counted"
        rows = [(str(lacked), str(reads)) for lacked, reads in self.histogram.items()]
        return f"max_staleness={self.max_staleness}\n" + format_table([("updates lacked", "reads"), *rows], right=(0, 1))


def staleness_here(group: int) -> tuple[int, dict[int, int]]:
    """Return the task id of this worker, and what its reads have lacked, in a group of tasks given by its number."""
    client = here(group)
    return client.channel.group.task_id, dict(client.staleness)
