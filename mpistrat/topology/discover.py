"""Discover the topology of a running job: the nodes, and the GPUs of all ranks, which must be compatible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpistrat import settings
from mpistrat.device.binding import bound_device
from mpistrat.device.cuda import Identity
from mpistrat.errors import LaunchError, MpistratError, TopologyError
from mpistrat.launch.bootstrap import Bound, bind_again, what_is_bound
from mpistrat.lazy import MPI
from mpistrat.logger import logger
from mpistrat.text import ranks_by, ranks_text
from mpistrat.topology.world import World


def discover(comm: MPI.Intracomm, virtual_nodes: str | None = None) -> World:
    """Return the topology of the ranks of `comm`. A collective call.

    Ranks are on one node if they can share memory. The launcher's variables are not used: they often describe the launcher's
    daemon instead of the rank. The shape of virtual nodes is by default MPISTRAT_VIRTUAL_NODES of rank 0, which is that of the
    whole job: the ranks of a smaller `comm` keep their places in it. Every rank raises a TopologyError if the shape is
    malformed, has another number of ranks, or puts ranks of two machines on one node.
    """
    labels, names = real_nodes(comm)
    shape = comm.bcast(settings.VIRTUAL_NODES.read() if virtual_nodes is None else virtual_nodes)
    if not shape:
        return World.from_node_of_rank(labels, names)
    world = _part_of_job(comm, shape) if virtual_nodes is None else World.from_shape(shape, comm.Get_size())
    for node in world.nodes:
        machines = sorted({names[rank] for rank in node.ranks})
        if len({labels[rank] for rank in node.ranks}) > 1:
            raise TopologyError(
                f"virtual node {node.index} of shape {shape!r} would hold ranks {', '.join(map(str, node.ranks))} of several "
                f"machines ({', '.join(machines)}); a virtual node must lie within one machine: unset MPISTRAT_VIRTUAL_NODES "
                "or choose a shape that divides each machine"
            )
    return world


def _part_of_job(comm: MPI.Intracomm, shape: str) -> World:
    """Return the world of the ranks of `comm` in a job of a shape; where they are all of them, in the order of `comm`."""
    if comm.Get_size() == MPI.COMM_WORLD.Get_size():
        return World.from_shape(shape, comm.Get_size())
    job = World.from_shape(shape, MPI.COMM_WORLD.Get_size())
    nodes = [job.place(rank).node for rank in comm.allgather(MPI.COMM_WORLD.Get_rank())]
    return World.from_node_of_rank([node.index for node in nodes], [node.name for node in nodes])


def real_nodes(comm: MPI.Intracomm) -> tuple[list[int], list[str]]:
    """Return, for each rank, the lowest rank it can share memory with, and the name of its machine. A collective call."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    lowest = node.bcast(comm.Get_rank())
    node.Free()
    pairs = comm.allgather((lowest, MPI.Get_processor_name()))
    return [label for label, _ in pairs], [name for _, name in pairs]


@dataclass(frozen=True)
class Answer:
    """The device of one rank."""

    node: str
    place: tuple[int, int]  # local rank and number of ranks on the machine, by which ranks share memory
    bound: Bound  # before MPI started
    gpu: Identity | None = None
    index: int = 0  # CUDA's in its own process

    @property
    def key(self) -> str:
        """A unique key of the GPU, empty without one: machine, PCI bus id, and UUID, which distinguishes MIG instances."""
        return f"{self.node} {self.gpu.pci_bus_id} {self.gpu.uuid}" if self.gpu else ""

    def __str__(self) -> str:
        own = self.gpu
        return f"{own.name} {own.pci_bus_id} on {self.node} (device {self.index}, UUID {own.uuid[:8]}…)" if own else ""


def check_gpu_assignment(comm: MPI.Intracomm) -> None:
    """Check that the devices of all ranks are compatible. A collective call, of a few bytes if no rank drives a GPU.

    Rank 0 logs a warning if ranks do not see the GPUs of their neighbours; with MPISTRAT_VERBOSE it lists all GPUs.
    """
    bound, prints = what_is_bound(), comm.Get_rank() == 0 and settings.VERBOSE.read_or_default()
    if not any(comm.allgather(bound_device() is not None or bool(bound and bound.problem))):
        if prints and bound is not None:
            logger.info(f"computing on CPUs: {bound.why}")
        return
    answers = comm.allgather(_answer(comm))
    try:
        check_answers(answers, comm.bcast(settings.ALLOW_SHARED_GPU.read_or_default()))
    except MpistratError as error:
        error.raised_everywhere = True
        raise
    if comm.Get_rank() == 0 and (warning := isolation(answers)):
        logger.warning(warning)
    if prints:
        for rank, answer in enumerate(answers):
            logger.info(f"rank {rank}: {'; '.join(filter(None, (str(answer), answer.bound.why)))}")


def check_answers(answers: Sequence[Answer], allow_shared: bool) -> None:
    """Check that either all ranks of a job drive a GPU or none does, each as it was bound, and no two the same one."""
    problems = [(rank, answer.bound.problem) for rank, answer in enumerate(answers) if answer.bound.problem]
    if problems:
        rank, problem = problems[0]
        others = f"; the same on {len(problems)} of {len(answers)} ranks" if len(problems) > 1 else ""
        raise LaunchError(
            f"rank {rank} on {answers[rank].node}: {problem}{others}. Ask for nodes with GPUs (SLURM: --gpus-per-node), or set "
            f"{settings.DEVICE.name}=auto or cpu"
        )
    for rank, answer in enumerate(answers):
        _check_place(rank, answer)
    gpus = {rank: answer for rank, answer in enumerate(answers) if answer.gpu}
    without = [rank for rank in range(len(answers)) if rank not in gpus]
    if gpus and without:
        reasons = {answers[rank].bound.why: answers[rank].node for rank in without if answers[rank].bound.why}
        why = "; ".join(f"on {node}: {reason}" for reason, node in list(reasons.items())[:3])
        raise TopologyError(
            f"{ranks_text([*gpus])} with a GPU, {ranks_text(without)} without: all ranks of a job must compute on "
            "GPUs, or all on CPUs. Ask the scheduler for GPUs on every node (SLURM: --gpus-per-node), install CuPy on all of "
            "them, or set MPISTRAT_DEVICE=cpu" + (f" ({why})" if why else "")
        )
    for ranks in ranks_by((rank, gpu.key) for rank, gpu in gpus.items()).values():
        if len(ranks) > 1 and not allow_shared:
            raise TopologyError(
                f"{ranks_text(ranks)} drive the same GPU, {gpus[ranks[0]]}: each rank needs a GPU of its own. Start as many "
                "ranks per node as it has GPUs, let every rank see all GPUs of its node (SLURM: --gpus-per-node=N "
                "--gpu-bind=none), or set MPISTRAT_ALLOW_SHARED_GPU=1 for a test"
            )


def isolation(answers: Sequence[Answer]) -> str:
    """Return a warning if ranks of one machine each see one GPU and not those of the others; else an empty string."""
    alone = [answer for answer in answers if answer.gpu and answer.bound.num_visible == 1 and answer.place[1] > 1]
    if len({answer.key for answer in alone}) < 2:
        return ""
    return (
        f"each rank on {alone[0].node} sees only its own GPU: NCCL and CUDA IPC may not be able to reach the memory of the "
        "others. SLURM: --gpus-per-node=N --gpu-bind=none instead of --gpus-per-task; elsewhere give all ranks of a node the "
        "same CUDA_VISIBLE_DEVICES"
    )


def _check_place(rank: int, answer: Answer) -> None:
    bound, local_rank = answer.bound, answer.place[0]
    if bound.place is None or bound.num_visible < 2 or bound.place[0] == local_rank:
        return
    raise LaunchError(
        f"rank {rank} on {answer.node} drives {answer}, because {bound.launcher} set its local rank to {bound.place[0]}; "
        f"but among the ranks that it shares memory with, it is local rank {local_rank} of {answer.place[1]}. Start the job "
        "with the launcher that belongs to this MPI (mpistrat run, its mpiexec, or srun with the right --mpi), and unset "
        "variables of another launcher"
    )


def _answer(comm: MPI.Intracomm) -> Answer:
    labels, rank = real_nodes(comm)[0], comm.Get_rank()
    place = labels[:rank].count(labels[rank]), labels.count(labels[rank])
    bound = what_is_bound()
    if bound is not None and bound.place is not None and not bound.launcher and bound.place != place:
        bind_again(*place)
    node, device, bound = MPI.Get_processor_name(), bound_device(), what_is_bound() or Bound("")
    if device is None:
        return Answer(node, place, bound)
    try:
        return Answer(node, place, bound, device.identity(), device.index)
    except RuntimeError as error:  # raised by CUDA
        return Answer(node, place, replace(bound, problem=f"device {device.index} cannot be identified: {error}"))
