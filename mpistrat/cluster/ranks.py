"""RankResolver: each rank is a task, on the host that it runs on."""

from __future__ import annotations

from collections.abc import Mapping

from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.topology.world import World

__all__ = ["RankResolver"]


class RankResolver(ClusterResolver):
    """Assigns the ranks of a world to jobs, in the order of both; a rank's address is its host and a port of its own.

    Parameters
    ----------
    world : World
        Which rank runs on which host.
    rank : int
        This rank.
    jobs : dict, optional
        Job name -> number of tasks; by default all ranks are workers.
    port_base : int
        The port of the first rank of a host; the next ranks get the next ports.
    rpc_layer : str, optional
        The protocol that `master` puts before an address.

    Raises
    ------
    InvalidArgumentError
        If `port_base` or a number of tasks is invalid.
    LaunchError
        If the jobs have more or fewer tasks than there are ranks.
    """

    def __init__(
        self,
        world: World,
        rank: int,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = None,
    ) -> None:
        counts = {"worker": world.size} if jobs is None else dict(jobs)
        _check_numbers(counts, port_base, max(world.local_sizes))
        if sum(counts.values()) != world.size:
            asked = ", ".join(f"{count} of {job}" for job, count in counts.items())
            raise LaunchError(
                f"jobs asks for {sum(counts.values())} tasks ({asked}), but {world.size} were launched; start as many as the "
                "jobs have, or leave jobs out: all are workers then"
            )
        roles = [(job, index) for job, count in counts.items() for index in range(count)]
        addresses = iter(_addresses(world, port_base))
        self._spec = ClusterSpec({job: [next(addresses) for _ in range(count)] for job, count in counts.items()})
        self.task_type, self.task_id = roles[rank]
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return a copy of the cluster."""
        return ClusterSpec(self._spec)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job of this process, and its index there."""
        return self.task_type, self.task_id


def _check_numbers(counts: Mapping[str, int], port_base: int, num_ports: int) -> None:
    for job, count in counts.items():
        if not isinstance(count, int) or count < 0:
            raise InvalidArgumentError(f"jobs gives {count!r} tasks to {job!r}; a number of tasks is 0 or greater")
    if not isinstance(port_base, int) or not 0 < port_base <= 65536 - num_ports:
        raise InvalidArgumentError(
            f"port_base must be a port, 1 to {65536 - num_ports}, that {num_ports} ports follow; got {port_base!r}"
        )


def _addresses(world: World, port_base: int) -> list[str]:
    places = [world.place(rank) for rank in range(world.size)]
    return [f"{world.nodes[place.node_index].name}:{port_base + place.local_rank}" for place in places]
