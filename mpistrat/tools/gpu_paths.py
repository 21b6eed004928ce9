"""The transports of arrays on GPUs, as far as settings and earlier jobs determine them. Needs neither MPI nor a GPU."""

from __future__ import annotations

from mpistrat import settings
from mpistrat.launch.cuda_awareness import kept_verdicts
from mpistrat.settings import Setting
from mpistrat.text import format_table
from mpistrat.topology.world import World
from mpistrat.tuning.file import kept


def paths_text(world: World) -> str:
    """Return a table of the transports inside nodes and between them, and why.

    Raises
    ------
    SettingError
        If a setting cannot be read.
    """
    rows = [("inside nodes", _inside(world)), *(("between nodes", text) for text in _between(world))]
    return format_table(rows + [("measured", text) for text in _measured(world)])


def _inside(world: World) -> str:
    wanted = settings.INTRA_TRANSPORT.read()
    if world.num_shards == 1:
        return "nothing: each node has one rank"
    if wanted != "auto":
        return f"{wanted}: set by {settings.INTRA_TRANSPORT.name}"
    return "nccl where the ranks of a node can use it, else cuda_ipc, else staged"


def _between(world: World) -> list[str]:
    inter, mpi_gpu = settings.INTER_TRANSPORT.read(), settings.MPI_GPU.read()
    if world.num_nodes == 1:
        return ["nothing: there is one node"]
    if inter == "nccl":
        return [
            f"nccl: set by {settings.INTER_TRANSPORT.name}; auto is one call of NCCL for all ranks, whose time is not predicted"
        ]
    if inter != "auto":
        return [f"staged over {inter}: set by {settings.INTER_TRANSPORT.name}"]
    if mpi_gpu != "auto":
        return [f"{_transport(mpi_gpu == 'on')}: {settings.MPI_GPU.name}={mpi_gpu}"]
    found = [
        f"{_transport(verdict.is_aware)} with {library.version} in {library.path}: {verdict.reason} ({date})"
        for library, verdict, date in kept_verdicts()
    ]
    return found or [f"{_transport(True)} if MPI is CUDA-aware, else {_transport(False)}: the first job on GPUs will find out"]


def _measured(world: World) -> list[str]:
    """Return what mpistrat tune has found on GPUs, on several nodes or on one, and what auto does about it."""
    setting: Setting[str] | Setting[int | None] = settings.INTER_TRANSPORT if world.num_nodes > 1 else settings.ONE_SHOT_BYTES
    if world.size == 1 or setting.read() != setting.default:
        return []
    found = [
        f"on {tuning.gpus.device}, {tuning.conditions.world}: {tuning.gpus.times(tuning.date)}, by which auto chooses"
        for _, tuning, _ in kept()
        if settings.TUNING.read().lower() != "off"
        and tuning
        and tuning.gpus
        and ("mpi" in tuning.gpus.ways) == (world.num_nodes > 1)
    ]
    if world.num_nodes > 1:
        return found or ["nothing, so auto takes MPI between nodes: mpistrat tune compares it with NCCL"]
    return found or ["cuda_ipc was not measured; the built-in one-shot limit is used. Run mpistrat tune."]


def _transport(is_aware: bool) -> str:
    return "cuda_aware" if is_aware else "staged over mpi_ring"
