"""MPIClusterResolver: the cluster formed by the ranks of MPI; RankResolver: by those of any world."""

from __future__ import annotations

from collections.abc import Mapping

from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.topology.world import World


class RankResolver(ClusterResolver):
    """Assigns the ranks of a world to jobs, in the order of both; a rank's address is its host and a port of its own."""

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
        places = [world.place(each) for each in range(world.size)]
        addresses = iter([f"{world.nodes[place.node_index].name}:{port_base + place.local_rank}" for place in places])
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


class MPIClusterResolver(RankResolver):
    """Makes each rank a task, in rank order; the host of a task is the processor name that MPI reports.

    Creating one is a collective call of all ranks of the job.

    Parameters
    ----------
    jobs : dict, optional
        Job name -> number of tasks, assigned to the ranks in this order; by default all ranks are workers.
    port_base : int
        The port of the first rank of a host; the next ranks get the next ports.
    rpc_layer : str, optional
        The protocol that `master` puts before an address.
    chief, ps, evaluator : int
        Instead of `jobs`: the number of tasks of each, assigned in this order; the other ranks are workers, between the last ps
        and the evaluator.

    Raises
    ------
    InvalidArgumentError
        If `port_base` or a number of tasks is invalid, or both `jobs` and numbers of tasks are passed.
    LaunchError
        If the jobs have more or fewer tasks than there are ranks.
    AgreementError
        If ranks passed different arguments.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = None,
        *,
        chief: int = 0,
        ps: int = 0,
        evaluator: int = 0,
    ) -> None:
        others = {"chief": chief, "ps": ps, "evaluator": evaluator}
        named = "".join(f", {job}={count!r}" for job, count in others.items() if count)
        call = f"MPIClusterResolver(jobs={jobs!r}, port_base={port_base!r}, rpc_layer={rpc_layer!r}{named})"
        with rendezvous("MPIClusterResolver") as job:

            def resolve() -> None:
                dealt = _with_workers(jobs, others, job.world.size) if named else jobs
                RankResolver.__init__(self, job.world, job.rank, dealt, port_base, rpc_layer)

            job.agree(call, resolve)


def _with_workers(jobs: Mapping[str, int] | None, others: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the number of tasks of each job, with all other ranks as workers."""
    if jobs is not None:
        raise InvalidArgumentError(f"pass either jobs or chief, ps and evaluator; got jobs={jobs!r} and {dict(others)!r}")
    workers = size - sum(others.values())
    if workers < 1:
        asked = ", ".join(f"{count} {job}" for job, count in others.items() if count)
        raise LaunchError(
            f"{asked} and at least one worker are {sum(others.values()) + 1} ranks, but {size} were launched: start at least "
            f"as many, for example with `mpistrat run -n {sum(others.values()) + 1}`"
        )
    return {"chief": others["chief"], "ps": others["ps"], "worker": workers, "evaluator": others["evaluator"]}
