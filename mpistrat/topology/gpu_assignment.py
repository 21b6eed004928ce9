"""Check the GPU assignment of all ranks: they exchange which GPU each drives and why, and check that these are compatible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from mpistrat import settings
from mpistrat.device.binding import bound_device
from mpistrat.errors import LaunchError, MpistratError, SettingError, TopologyError
from mpistrat.launch.gpu_binding import Bound, bind_again, what_is_bound
from mpistrat.logger import logger
from mpistrat.topology.gpus import Gpu, check_gpus, gpu_affinity

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Answer", "check_answers", "check_gpu_assignment", "isolation"]


@dataclass(frozen=True)
class Answer:
    """The device of one rank.

    Attributes
    ----------
    node : str
        Its machine.
    place : tuple of int
        Local rank and number of ranks on the machine, by which ranks share memory.
    bound : Bound
        The device that it has bound before MPI started.
    gpu : Gpu or None
        The GPU that it drives; None: it computes on its CPU.
    near : str
        The memory and network adapters near the GPU.
    """

    node: str
    place: tuple[int, int]
    bound: Bound
    gpu: Gpu | None = None
    near: str = ""


def check_gpu_assignment(comm: MPI.Intracomm) -> None:
    """Check that the devices of all ranks are compatible. A collective call, of a few bytes if no rank drives a GPU.

    Rank 0 logs a warning if ranks do not see the GPUs of their neighbours; with MPISTRAT_VERBOSE it lists all GPUs.

    Raises
    ------
    LaunchError
        On all ranks, if one of them cannot use the device that was asked for, or chose it by a wrong local rank.
    SettingError
        On all ranks, if MPISTRAT_VERBOSE cannot be read on one of them.
    TopologyError
        On all ranks, if some drive a GPU and others none, or several the same without MPISTRAT_ALLOW_SHARED_GPU.
    """
    try:
        _check_assignment(comm)
    except MpistratError as error:
        error.raised_everywhere = True
        raise


def check_answers(answers: Sequence[Answer], allow_shared: bool | str) -> None:
    """Check the devices of all ranks.

    Parameters
    ----------
    answers : sequence of Answer
        One for each rank.
    allow_shared : bool or str
        Whether several ranks may drive one GPU, or a text that says why the setting cannot be read.

    Raises
    ------
    LaunchError, TopologyError
        As `check_gpu_assignment`.
    """
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
    if isinstance(allow_shared, str):
        raise LaunchError(f"rank 0 on {answers[0].node}: {allow_shared}")
    try:
        check_gpus([answer.gpu for answer in answers], allow_shared)
    except TopologyError as error:
        reasons = {answer.bound.why: answer for answer in answers if answer.gpu is None and answer.bound.why}
        why = "; ".join(f"on {answer.node}: {reason}" for reason, answer in list(reasons.items())[:3])
        raise TopologyError(f"{error} ({why})" if why else str(error)) from None


def isolation(answers: Sequence[Answer]) -> str:
    """Return a warning if ranks of one machine each see one GPU and not those of the others; else an empty string."""
    alone = [answer for answer in answers if answer.gpu and answer.bound.num_visible == 1 and answer.place[1] > 1]
    if len({answer.gpu.key for answer in alone if answer.gpu}) < 2:
        return ""
    return (
        f"each rank on {alone[0].node} sees only its own GPU: NCCL and CUDA IPC may not be able to reach the memory of the "
        "others. SLURM: --gpus-per-node=N --gpu-bind=none instead of --gpus-per-task; elsewhere give all ranks of a node the "
        "same CUDA_VISIBLE_DEVICES"
    )


def _check_assignment(comm: MPI.Intracomm) -> None:
    bound, verbose = what_is_bound(), _read(settings.VERBOSE)
    drive_gpus, verbosities = zip(
        *comm.allgather((bound_device() is not None or bool(bound and bound.problem), verbose)), strict=True
    )
    for rank, problem in enumerate(verbosities):
        if isinstance(problem, str):
            raise SettingError(f"rank {rank}: {problem}")
    prints = verbose is True and comm.Get_rank() == 0
    if not any(drive_gpus):
        if prints and bound is not None:
            logger.info(f"computing on CPUs: {bound.why}")
        return
    answers = comm.allgather(_answer(comm))
    check_answers(answers, comm.bcast(_read(settings.ALLOW_SHARED_GPU)))
    if comm.Get_rank() == 0 and (warning := isolation(answers)):
        logger.warning(warning)
    if prints:
        for rank, answer in enumerate(answers):
            logger.info(f"rank {rank}: {'; '.join(filter(None, (str(answer.gpu), answer.bound.why, answer.near)))}")


def _check_place(rank: int, answer: Answer) -> None:
    bound, local_rank = answer.bound, answer.place[0]
    if bound.place is None or bound.num_visible < 2 or bound.place[0] == local_rank:
        return
    raise LaunchError(
        f"rank {rank} on {answer.node} drives {answer.gpu}, because {bound.launcher} set its local rank to {bound.place[0]}; "
        f"but among the ranks that it shares memory with, it is local rank {local_rank} of {answer.place[1]}. Start the job "
        "with the launcher that belongs to this MPI (mpistrat run, its mpiexec, or srun with the right --mpi), and unset "
        "variables of another launcher"
    )


def _answer(comm: MPI.Intracomm) -> Answer:
    from mpi4py import MPI

    machine = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    place = machine.Get_rank(), machine.Get_size()
    machine.Free()
    bound = what_is_bound()
    if bound is not None and bound.place is not None and not bound.launcher and bound.place != place:
        bind_again(*place)
    node, device, bound = MPI.Get_processor_name(), bound_device(), what_is_bound() or Bound("")
    if device is None:
        return Answer(node, place, bound)
    try:
        gpu = Gpu(node, index=device.index, **asdict(device.identity()))
    except RuntimeError as error:  # raised by CUDA
        return Answer(node, place, replace(bound, problem=f"device {device.index} cannot be identified: {error}"))
    return Answer(node, place, bound, gpu, str(gpu_affinity(gpu.pci_bus_id)))


def _read(setting: settings.Setting[bool]) -> bool | str:
    """Return the value of a setting, or the error if it cannot be read."""
    try:
        return setting.read()
    except SettingError as error:
        return str(error)
