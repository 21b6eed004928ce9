"""Bind the GPU, start MPI once, check the number of ranks against the launcher's, and install the hooks for a clean end.

The GPU is chosen by local rank, and bound before MPI starts, because a CUDA-aware MPI uses the device that is current then.

Processes that a rank forks or starts are not ranks, and end without affecting the job. A forked child has a copy of its
parent's MPI in memory, with its connections: if it finalized MPI at exit it would tell the launcher that the parent had. A
program that a rank starts inherits the launcher's variables: a rank marks its environment with its pid, and a process that
finds the mark of another pid, for the same rank of the same job, forgets them.

Invariant: ``CUDA_VISIBLE_DEVICES`` is never written. Binding raises nothing either: if one rank failed before MPI starts, the
others would wait for it in MPI_Init; errors are kept until all ranks can raise them together.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import takewhile

from mpistrat import settings
from mpistrat.device import binding, cuda
from mpistrat.errors import LaunchError, SettingError
from mpistrat.launch import abort, environment, openmpi, process
from mpistrat.launch.environment import FLAVOURS, no_library, recognise
from mpistrat.lazy import MPI
from mpistrat.logger import logger

_lock = threading.Lock()
_world: MPI.Intracomm | None = None
_is_child = False


def start() -> MPI.Intracomm:
    """Start MPI unless it runs already, and return COMM_WORLD, which callers must duplicate and never use itself.

    A LaunchError says that MPI is missing, not running, or lacks threads or ranks, or that this is a forked child of a rank
    that is one of several: a child of a single one computes as that does.
    """
    global _world
    with _lock:
        if _world is None:
            _world = _start()
        else:
            _check_running()  # the program may have finalized it
        if _is_child and _world.Get_size() > 1:
            raise LaunchError(f"process {os.getpid()} was forked from a rank, and is no rank; let the parent communicate")
        return _world


def check_launched_size(view: environment.LauncherView | None, size: int, text: str) -> None:
    """Check that MPI, which says this of itself, joined all ranks that the launcher says it started: else they do not fit."""
    if view is None or view.size is None or view.size <= size:
        return
    known = recognise(text)
    vendor, version = (known[0].name, f" {known[1]}") if known else (text, "")
    found = f"rank {view.rank}: {view.launcher} started {view.size} ranks, but MPI ({vendor}{version}) formed worlds of {size}"
    if view.launcher != environment.SRUN:
        raise LaunchError(
            f"{found}: this launcher does not belong to this MPI. Start with the mpiexec of {vendor}, "
            f"which `mpistrat run -n {view.size}` finds, or name the launcher's libmpi.so in MPI4PY_LIBMPI."
        )
    advice = known[0].srun_option if known else "another --mpi type (`srun --mpi=list` shows them)"
    accepted = ", ".join(f"{flavour.name}: {flavour.srun_option}" for flavour in FLAVOURS)
    raise LaunchError(
        f"{found}: srun's --mpi type does not fit this MPI. Use srun {advice} for {vendor}, "
        f"or its own mpiexec inside the allocation. Accepted are {accepted}."
    )


def library_version() -> str:
    """Return name and version of the MPI library that runs: ``Open MPI v5.0.11``."""
    return str(MPI.Get_library_version()).split("\n")[0].split(",")[0].strip("\0 ")


def _start() -> MPI.Intracomm:
    _forget_launcher(os.environ)
    view = environment.detect()
    launcher = process.find_launcher(os.environ)
    bind_device(view)
    chosen: dict[str, str] = {}
    if "mpi4py.MPI" not in sys.modules:
        openmpi.set_home(os.environ)
        oversubscribed = view is not None and (view.local_size or 1) > openmpi.num_cores()
        chosen = openmpi.parameters(os.environ, oversubscribed, alone=view is None)
        os.environ.update(chosen)
    try:
        import mpi4py

        if abort.survives_losses(os.environ):
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises either, depending on where its search ends
        raise LaunchError(no_library(str(error))) from error
    # MPI has read them, and a job that this process starts is not alone
    for name in chosen if view is None and MPI.Is_initialized() else ():
        os.environ.pop(name, None)
    _check_running()
    check_launched_size(view, MPI.COMM_WORLD.size, library_version())
    abort.watch_exit()
    os.register_at_fork(after_in_child=_begin_child)
    if checksum := _checksum(os.environ):  # of the variables that identify rank and job
        os.environ[settings.RANK_PID] = f"{os.getpid()}:{checksum}"
    if settings.ABORT.read_or_default():
        abort.install(MPI.COMM_WORLD)
    if launcher is not None and MPI.COMM_WORLD.size > 1:
        process.watch_launcher(launcher, MPI.COMM_WORLD.rank)
    return MPI.COMM_WORLD


def _check_running() -> None:
    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "was finalized already" if MPI.Is_initialized() else "was not started, because mpi4py.rc.initialize is off"
        raise LaunchError(f"MPI {state}; a strategy needs it running: leave mpi4py.rc as it is, or call MPI.Init_thread first")
    names = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            f"MPI runs at thread level {names[MPI.Query_thread()]}; MULTIPLE is needed, because an exception on any thread "
            "must be able to end the job. Leave mpi4py.rc.thread_level at 'multiple', and use an MPI library that supports it."
        )


def _forget_launcher(environ: MutableMapping[str, str]) -> None:
    """Remove the launcher's variables if this process has inherited them from a rank, and log that."""
    pid, _, checksum = environ.get(settings.RANK_PID, "").partition(":")
    if not pid.isdecimal() or int(pid) == os.getpid() or checksum != _checksum(environ) or _is_launched_by(int(pid)):
        return
    who = f"process {os.getpid()} was started by a rank (process {pid}), whose launcher's variables it has inherited"
    if "mpi4py.MPI" in sys.modules:
        raise LaunchError(
            f"{who}, and has started MPI with them. Import mpistrat and make the strategy before mpi4py.MPI is imported, or "
            f"unset them when you start the process: {', '.join(environment.identity(environ))}."
        )
    kept = environment.without_launcher(environ)
    for name in [name for name in environ if name not in kept or name in (settings.RANK_PID, settings.VIRTUAL_NODES.name)]:
        del environ[name]
    openmpi.remove_parameters(environ)
    logger.warning(f"{who}; it is not a rank, and computes alone.")


def _checksum(environ: Mapping[str, str]) -> str:
    place = environment.identity(environ)
    return f"{zlib.crc32(repr(sorted(place.items())).encode()):08x}" if place else ""


def _is_launched_by(pid: int) -> bool:
    """Return whether a launcher is between this process and an ancestor: hydra gives its first rank equal variables."""
    chain = list(takewhile(lambda found: found.pid != pid, process.ancestors()))
    return any(found.is_launcher for found in chain) and chain[-1].parent == pid


def _begin_child() -> None:
    global _is_child
    if not _is_child:
        _is_child = True
        # registered last, so called first: the exit handlers of the parent must not run in the child
        atexit.register(lambda: abort.leave(abort.ending_code()))


@dataclass(frozen=True)
class Bound:
    """The device that this process has bound, and why."""

    why: str  # this GPU, or none
    place: tuple[int, int] | None = None  # local rank and size by which it was chosen; None if no GPU is bound
    launcher: str = ""  # that set the local rank; empty if none did, so that local rank 0 was assumed
    num_visible: int = 0  # GPUs that the process sees
    problem: str = ""  # the error that all ranks raise later, together


_bound: Bound | None = None


def bind_device(view: environment.LauncherView | None) -> None:
    """Bind the GPU of this process's local rank, unless a device has been bound before."""
    global _bound
    if binding.bound_device() is None:
        _bound = _bind(view)


def bind_again(local_rank: int, local_size: int) -> None:
    """Bind another GPU, when no launcher has set the local rank and local rank 0 was assumed."""
    binding.bind(None)
    bind_device(environment.LauncherView("the ranks that share memory", local_rank=local_rank, local_size=local_size))


def what_is_bound() -> Bound | None:
    """Return the result of `bind_device`; None if it was not called, or a device had been bound before."""
    return _bound


def choose_device(local_rank: int, local_size: int, num_visible: int) -> tuple[int, str]:
    """Return the index of the GPU of a rank among the visible ones, of which there is at least one, and why."""
    if num_visible == 1:
        return 0, "the only GPU that this process sees"
    place = f"local rank {local_rank} of {local_size}"
    if local_size <= num_visible:
        return local_rank, f"{place} on a node with {num_visible} GPUs"
    return local_rank % num_visible, f"{place} shares {num_visible} GPUs: {local_rank} mod {num_visible}"


def _bind(view: environment.LauncherView | None) -> Bound:
    try:
        wanted = settings.DEVICE.read()
    except SettingError as error:
        return Bound("", problem=str(error))
    num_visible, missing = (0, f"{settings.DEVICE.name}=cpu") if wanted == "cpu" else cuda.count_visible()
    if not num_visible:
        binding.bind(None, missing)
        return Bound(missing, problem=f"{settings.DEVICE.name}=gpu was set, but {missing}" if wanted == "gpu" else "")
    place, launcher = (0, 1), ""
    if view is not None and view.local_rank is not None:
        place, launcher = (view.local_rank, view.local_size or view.local_rank + 1), view.launcher
    index, why = choose_device(*place, num_visible)
    device = cuda.Device(index)
    try:
        device.use()
    except RuntimeError as error:
        return Bound(why, problem=f"device {index} ({why}) cannot be used: {error}")
    binding.bind(device)
    return Bound(why, place, launcher, num_visible)
