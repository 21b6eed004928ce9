"""MPIClusterResolver: the cluster formed by the ranks of MPI; SlurmClusterResolver: the same, by TensorFlow's name."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.topology.world import World


class MPIClusterResolver(ClusterResolver):
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
        call = f"{type(self).__name__}(jobs={jobs!r}, port_base={port_base!r}, rpc_layer={rpc_layer!r}{named})"
        with rendezvous(type(self).__name__) as job:

            def resolve() -> tuple[ClusterSpec, list[tuple[str, int]]]:
                dealt = _with_workers(jobs, others, job.world.size) if named else jobs
                return tasks_of_ranks(job.world, dealt, port_base)

            self._spec, roles = job.agree(call, resolve)
            self.task_type, self.task_id = roles[job.rank]
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return a copy of the cluster."""
        return ClusterSpec(self._spec)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job of this process, and its index there."""
        return self.task_type, self.task_id


class SlurmClusterResolver(MPIClusterResolver):
    """Makes each rank a task, as `MPIClusterResolver` does: MPI tells which task SLURM runs on which node.

    Creating one is a collective call of all ranks of the job. SLURM's binding of CPUs and GPUs is not changed.

    Parameters
    ----------
    jobs, port_base, rpc_layer : dict, int, str
        As for `MPIClusterResolver`.
    gpus_per_node : int, optional
        GPUs of each node; by default the number that SLURM gives, or else the length of ``CUDA_VISIBLE_DEVICES``.
    gpus_per_task : int, optional
        GPUs of each task; by default the GPUs of a node divided by its tasks.
    tasks_per_node, auto_set_gpu : object
        Accepted as in TensorFlow, without effect: MPI counts the tasks, and ``CUDA_VISIBLE_DEVICES`` is never written.

    Raises
    ------
    LaunchError
        If the jobs have more or fewer tasks than there are ranks, or the tasks of a node need more GPUs than it has.
    InvalidArgumentError
        If a number is invalid.
    AgreementError
        If ranks passed different arguments, or another one raises one of these.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
    ) -> None:
        super().__init__(jobs, port_base, rpc_layer)
        call = f"SlurmClusterResolver(gpus_per_node={gpus_per_node!r}, gpus_per_task={gpus_per_task!r})"
        with rendezvous("SlurmClusterResolver") as job:
            most_on_a_node = max(job.world.local_sizes)
            self._gpus_per_task = job.agree(call, lambda: gpus_of_task(most_on_a_node, gpus_per_node, gpus_per_task))

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the number of GPUs of each task; empty if there are none."""
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}


def tasks_of_ranks(world: World, jobs: Mapping[str, int] | None, port_base: int) -> tuple[ClusterSpec, list[tuple[str, int]]]:
    """Return the cluster of the ranks of a world, and the task of each; an address is a rank's host and a port of its own."""
    counts, num_ports = {"worker": world.size} if jobs is None else dict(jobs), max(world.local_sizes)
    for job, count in counts.items():
        if not isinstance(count, int) or count < 0:
            raise InvalidArgumentError(f"jobs gives {count!r} tasks to {job!r}; a number of tasks is 0 or greater")
    if not isinstance(port_base, int) or not 0 < port_base <= 65536 - num_ports:
        raise InvalidArgumentError(
            f"port_base must be a port, 1 to {65536 - num_ports}, that {num_ports} ports follow; got {port_base!r}"
        )
    if sum(counts.values()) != world.size:
        asked = ", ".join(f"{count} of {job}" for job, count in counts.items())
        raise LaunchError(
            f"jobs asks for {sum(counts.values())} tasks ({asked}), but {world.size} were launched; start as many as the "
            "jobs have, or leave jobs out: all are workers then"
        )
    places = map(world.place, range(world.size))
    addresses = iter([f"{world.nodes[place.node_index].name}:{port_base + place.local_rank}" for place in places])
    spec = ClusterSpec({job: [next(addresses) for _ in range(count)] for job, count in counts.items()})
    return spec, [(job, index) for job, count in counts.items() for index in range(count)]


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


def gpus_of_task(num_tasks: int, per_node: int | None, per_task: int | None) -> int:
    """Return the number of GPUs of each task; a node has at most `num_tasks` tasks."""
    for name, number in (("gpus_per_node", per_node), ("gpus_per_task", per_task)):
        if number is not None and (not isinstance(number, int) or number < 0):
            raise InvalidArgumentError(f"{name} must be 0 or a positive number; got {number!r}")
    count, visible = os.environ.get("SLURM_GPUS_ON_NODE", ""), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = int(count) if count.isdigit() else len([name for name in visible.split(",") if name.strip()])
    present = found if per_node is None else per_node
    wanted = present // num_tasks if per_task is None else per_task
    if wanted * num_tasks > present:
        raise LaunchError(
            f"{num_tasks} tasks on a node with {wanted} GPUs each need {wanted * num_tasks}, but the node has {present}; ask "
            "SLURM for more (--gpus-per-node), start fewer tasks, or pass a smaller gpus_per_task"
        )
    return wanted
