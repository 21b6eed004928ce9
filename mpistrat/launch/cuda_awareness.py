"""Whether MPI is CUDA-aware: by the setting, by the queries that the MPI library has, and by a probe.

If the library says no, that is the answer. If it says yes, or nothing, a probe in a separate process has to confirm it: builds
that claim to be CUDA-aware have been seen to crash. The answer is cached in one file per library.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mpistrat import settings
from mpistrat.device.binding import bound_device
from mpistrat.errors import SettingError
from mpistrat.launch.bootstrap import library_version
from mpistrat.launch.cuda_probe import AWARE, WRONG_VALUES
from mpistrat.launch.cuda_verdicts import Library, Verdict, keep, kept_for
from mpistrat.launch.environment import without_launcher

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "agreed_verdict",
    "find_verdict",
    "present_library",
    "probe",
]

PROBE_SECONDS = 60.0

_TRANSPORT_VARIABLES = re.compile(r"OMPI_MCA_|UCX_|I_MPI_OFFLOAD|MPICH_|MPIR_CVAR_|MV2_|FI_")
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


def agreed_verdict(comm: MPI.Intracomm) -> Verdict:
    """Return the verdict of rank 0 on all ranks of `comm`. A collective call.

    Raises
    ------
    SettingError
        On all ranks, if rank 0 cannot read MPISTRAT_MPI_GPU.
    """
    answer: Verdict | SettingError | None = None
    if comm.Get_rank() == 0:
        try:
            answer = find_verdict()
        except SettingError as error:
            answer = error
        except Exception as error:  # whatever it is: the other ranks wait for an answer
            answer = Verdict(False, f"the MPI library could not be queried ({type(error).__name__}: {error})", is_final=False)
    answer = comm.bcast(answer)
    if isinstance(answer, SettingError):
        raise answer
    assert answer is not None
    return answer


def find_verdict() -> Verdict:
    """Return whether device memory is passed to the MPI library of this process. A GPU must be bound."""
    wanted = settings.MPI_GPU.read()
    if wanted != "auto":
        return Verdict(wanted == "on", f"{settings.MPI_GPU.name}={wanted}", is_setting=True)
    library = present_library()
    kept = kept_for(library)
    if kept is not None:
        return kept
    verdict = _ask(library)
    if verdict.is_final:
        keep(library, verdict)
    return verdict


def present_library() -> Library:
    """Return the MPI library of this process, with the GPU that is bound."""
    from mpi4py import MPI

    mapped = re.findall(r"(/\S*/libmpi[^/\s]*\.so[^/\s]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    path = Path(mapped[0] if mapped else MPI.__file__)
    device = bound_device()
    found = {name: value for name, value in without_launcher(os.environ).items() if _TRANSPORT_VARIABLES.match(name)}
    shaped_by = " ".join(f"{name}={value}" for name, value in sorted(found.items()))
    return Library(str(path), library_version(), path.stat().st_mtime_ns, shaped_by, device.identity().name if device else "")


def probe(device_index: int, seconds: float = PROBE_SECONDS) -> Verdict:
    """Start a process that sends device memory to itself by MPI, and return whether that worked.

    Parameters
    ----------
    device_index : int
        CUDA's index of the GPU in this process.
    seconds : float
        The time limit, after which the process is killed with all its children.
    """
    import subprocess

    process = subprocess.Popen(
        [sys.executable, "-m", "mpistrat.launch.cuda_probe", str(device_index)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=without_launcher(os.environ),
        start_new_session=True,
    )
    try:
        _, output = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Verdict(False, f"a probe did not end within {seconds:g} s", is_final=False)
    return _judged(process.returncode, output)


def _ask(library: Library) -> Verdict:
    claim = _claim_of_library()
    if claim is not None and not claim.is_aware:
        return Verdict(False, f"{library.version} {claim.reason}")
    claim = claim or _claim_of_kinds()
    device = bound_device()
    assert device is not None, "needs a GPU"
    claimed = f"{library.version} {claim.reason}, and " if claim else ""
    if device.is_exclusive():
        reason = (
            f"no probe can open the GPU beside this process (EXCLUSIVE_PROCESS mode); {settings.MPI_GPU.name}=on goes without"
        )
        return Verdict(False, claimed + reason, is_final=False)
    proof = probe(device.index)
    return Verdict(proof.is_aware, f"{claimed}{proof.reason}", proof.is_final)


def _claim_of_library() -> Verdict | None:
    """Return the answer of the library's own query function; None if it has none."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # finds the functions of whichever MPI mpi4py has loaded
    queries: dict[str, Callable[[], bool]] = {
        "MPIX_Query_cuda_support": lambda: bool(library.MPIX_Query_cuda_support()),
        "MPIX_GPU_query_support": lambda: _gpu_query(library),
    }
    for name, ask in queries.items():
        if hasattr(library, name):
            is_aware = ask()
            return Verdict(is_aware, f"says {'yes' if is_aware else 'no'} ({name})")
    return None


def _gpu_query(library: ctypes.CDLL) -> bool:
    answer = ctypes.c_int(0)
    return library.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer)) == 0 and bool(answer.value)


def _claim_of_kinds() -> Verdict | None:
    """Return a verdict if MPI 4.1's memory kinds list cuda. They list what was requested: without cuda they prove nothing."""
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return Verdict(True, f"lists the memory kinds {kinds}") if "cuda" in kinds else None


def _judged(code: int, output: str) -> Verdict:
    """Return the verdict that follows from a probe's exit code and output."""
    if code == AWARE:
        return Verdict(True, "a probe sent device memory and got it back")
    if code == WRONG_VALUES:
        return Verdict(False, "a probe got wrong values")
    if code < 0:
        return Verdict(False, f"a probe died of {signal.Signals(-code).name}")
    lines = output.strip().splitlines() or ["it printed nothing"]
    return Verdict(False, f"a probe failed: {lines[-1].strip()}", is_final=False)
