"""SlurmClusterResolver: the cluster formed by the tasks of a SLURM step.

In SLURM's notation ``n[009-011],login`` is n009, n010, n011, login, and ``3(x2),2,1`` is 3, 3, 2, 1. Nodes are in the
order of its list, which is the order of ranks, and keep leading zeros. SLURM's binding of CPUs and GPUs is not changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import product

from mpistrat.cluster.mpi_resolver import RankResolver
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.launch import environment
from mpistrat.topology.world import World

_HOSTS = "a host list is NAME,NAME,…, where a name may hold ranges in brackets: n[009-011,20],rack[0-1]n[1-2]"
_TASKS = "a list of task counts is COUNT or COUNT(xNODES), joined by commas: 3(x2),2,1"


class SlurmClusterResolver(RankResolver):
    """Reads the task placement from srun's variables; does not communicate, and changes no variable.

    Parameters
    ----------
    jobs : dict, optional
        Job name -> number of tasks, assigned to the tasks of the step in this order; by default all are workers.
    port_base : int
        The port of the first task of a node; the next tasks get the next ports.
    gpus_per_node : int, optional
        GPUs of each node; by default the number that SLURM gives, or else the length of ``CUDA_VISIBLE_DEVICES``.
    gpus_per_task : int, optional
        GPUs of each task; by default the GPUs of a node divided by its tasks.
    tasks_per_node : int or dict, optional
        Tasks on each node, or node name -> tasks; by default the numbers that SLURM gives.
    auto_set_gpu : bool
        Accepted as in TensorFlow, without effect: ``CUDA_VISIBLE_DEVICES`` is never written, the scheduler's binding holds.
    rpc_layer : str
        The protocol that `master` puts before an address.

    Raises
    ------
    LaunchError
        If srun did not start this process, its variables contradict each other or the arguments, the jobs have more or
        fewer tasks than the step, or the tasks of a node need more GPUs than it has.
    InvalidArgumentError
        If a number is invalid, or a node is missing from `tasks_per_node`.
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
        rank = _rank()
        hosts = expand_hosts(_variable("SLURM_STEP_NODELIST"))
        counts = _checked_counts(hosts, _tasks(hosts, tasks_per_node))
        super().__init__(_world(rank, hosts, counts), rank, jobs, port_base, rpc_layer)
        self._gpus_per_task = _gpus(max(counts), gpus_per_node, gpus_per_task)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the number of GPUs of each task; empty if there are none."""
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}


def _rank() -> int:
    view = environment.detect()
    if view is None or view.launcher != environment.SRUN or view.rank is None:
        starter = "this process was not started as a task" if view is None else f"this process was started by {view.launcher}"
        raise LaunchError(
            f"SlurmClusterResolver reads the variables of srun, but {starter}: any SLURM_* variables belong to another "
            "process. Start with srun, or use MPIClusterResolver, which asks MPI."
        )
    return view.rank


def _variable(name: str) -> str:
    text = os.environ.get(name, "")
    if not text:
        raise LaunchError(f"{name} is not set, which srun sets for each task; start with srun, or use MPIClusterResolver")
    return text


def _tasks(hosts: Sequence[str], given: int | Mapping[str, int] | None) -> list[int]:
    """Return the tasks of each node."""
    if given is None:
        return expand_tasks(_variable("SLURM_STEP_TASKS_PER_NODE"))
    if isinstance(given, int):
        return [given] * len(hosts)
    missing = [host for host in hosts if host not in given]
    if missing:
        raise InvalidArgumentError(f"tasks_per_node names {', '.join(given) or 'no node'}, but not {', '.join(missing)}")
    return [given[host] for host in hosts]


def _checked_counts(hosts: Sequence[str], counts: list[int]) -> list[int]:
    found = f"tasks per node {', '.join(map(str, counts))} on {', '.join(hosts)}"
    if min(counts) < 1 or len(counts) != len(hosts):
        raise LaunchError(f"{found}: each of the {len(hosts)} nodes needs one number, of at least one task")
    total = int(_variable("SLURM_STEP_NUM_TASKS"))
    if sum(counts) != total:
        raise LaunchError(f"{found} are {sum(counts)} tasks, but SLURM_STEP_NUM_TASKS={total}")
    return counts


def _world(rank: int, hosts: Sequence[str], counts: Sequence[int]) -> World:
    """Return which task runs on which node."""
    distribution = os.environ.get("SLURM_DISTRIBUTION", "block").partition(":")[0].partition(",")[0]
    if distribution not in ("block", "cyclic"):
        raise LaunchError(
            f"SLURM_DISTRIBUTION={distribution} is not understood: use srun -m block or cyclic, or MPIClusterResolver"
        )
    shape = World.from_shape(f"{'+'.join(map(str, counts))}:{distribution}")
    nodes = [shape.place(task).node_index for task in range(shape.size)]
    world = World.from_node_of_rank(nodes, [hosts[node] for node in nodes])
    mates = ",".join(map(str, world.nodes[nodes[rank]].ranks))
    listed = os.environ.get("SLURM_GTIDS") or mates
    if listed != mates:
        raise LaunchError(
            f"with the distribution {distribution}, tasks {mates} are on the node of task {rank}, but SLURM_GTIDS={listed}: "
            "use srun -m block or cyclic, or MPIClusterResolver"
        )
    return world


def _gpus(num_tasks: int, per_node: int | None, per_task: int | None) -> int:
    """Return the number of GPUs of each task; a node has at most `num_tasks` tasks."""
    for name, number in (("gpus_per_node", per_node), ("gpus_per_task", per_task)):
        if number is not None and (not isinstance(number, int) or number < 0):
            raise InvalidArgumentError(f"{name} must be 0 or a positive number; got {number!r}")
    present = _gpus_here() if per_node is None else per_node
    wanted = present // num_tasks if per_task is None else per_task
    if wanted * num_tasks > present:
        raise LaunchError(
            f"{num_tasks} tasks on a node with {wanted} GPUs each need {wanted * num_tasks}, but the node has {present}; ask "
            "SLURM for more (--gpus-per-node), start fewer tasks, or pass a smaller gpus_per_task"
        )
    return wanted


def _gpus_here() -> int:
    count = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
        return int(count)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([name for name in visible.split(",") if name.strip()])


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a host list, in its order.

    If a name has several brackets, the last one varies fastest: ``rack[0-1]n[1-2]`` begins with rack0n1, rack0n2.
    """
    return [host for name in _names(text) for host in _expanded(name, text)]


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks on each node."""
    counts: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InvalidArgumentError(f"{text!r} holds {part!r}; {_TASKS}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _names(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    names = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],\s])+", text)
    if not names or ",".join(names) != text.strip():
        raise InvalidArgumentError(f"{text!r} cannot be read: a name is empty, or brackets are not paired; {_HOSTS}")
    return names


def _expanded(name: str, text: str) -> list[str]:
    # parts with odd indices were in brackets
    parts = re.split(r"\[(.*?)\]", name)
    choices = [_numbers(part, text) if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise InvalidArgumentError(f"{text!r} holds the range {part!r}, which is neither NUMBER nor LOW-HIGH; {_HOSTS}")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
