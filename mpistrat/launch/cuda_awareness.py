"""Whether MPI is CUDA-aware: by the setting, by the queries that the MPI library has, and by a probe.

If the library says no, that is the answer, unless it uses a UCX that knows CUDA, which moves GPU memory whatever MPI was built
with. If it says yes, or nothing, a probe in another process has to confirm it: builds that claim it have crashed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mpistrat import settings
from mpistrat.device.binding import bound_device
from mpistrat.launch.bootstrap import library_version
from mpistrat.launch.environment import without_launcher

PROBE_SECONDS = 60.0

AWARE, WRONG_VALUES = 0, 3  # exit codes of the probe
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)

_COUNTS = (1 << 10, 1 << 21)  # MPI sends short and long messages by different protocols, eager and rendezvous

_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


@dataclass(frozen=True)
class Verdict:
    """Whether device memory is passed to MPI directly, and why."""

    is_aware: bool
    reason: str
    is_setting: bool = False  # the user has set it with MPISTRAT_MPI_GPU


def find_verdict() -> Verdict:
    """Return whether device memory is passed to the MPI library of this process. A GPU must be bound."""
    wanted = settings.MPI_GPU.read()
    if wanted != "auto":
        return Verdict(wanted == "on", f"{settings.MPI_GPU.name}={wanted}", is_setting=True)
    try:
        return _ask()
    except Exception as error:  # a job does without
        return Verdict(False, f"the MPI library could not be queried ({type(error).__name__}: {error})")


def probe(device_index: int, seconds: float = PROBE_SECONDS, *, is_second: bool = False) -> Verdict:
    """Start a process that sends device memory to itself by MPI, and return whether that worked; it may crash.

    One that is killed, as by a node without memory, tells nothing about MPI, and is started once more.
    """
    import subprocess

    process = subprocess.Popen(
        [sys.executable, "-m", "mpistrat.launch.cuda_awareness", str(device_index)],
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
        return Verdict(False, f"a probe did not end within {seconds:g} s")
    if process.returncode in _KILLED and not is_second:
        return probe(device_index, seconds, is_second=True)
    return _judged(process.returncode, output)


@cache
def _ask() -> Verdict:
    claim = _claim_of_library()
    says = f"{library_version()} {claim.reason}" if claim else ""
    if claim and not claim.is_aware:
        if not _has_ucx_of_cuda():
            return Verdict(False, says)
        says += ", but UCX has loaded its module for CUDA"
    device = bound_device()
    assert device is not None, "needs a GPU"
    claimed = f"{says}, and " if says else ""
    if device.is_exclusive():
        reason = "the GPU is in EXCLUSIVE_PROCESS mode, so CUDA-awareness cannot be probed"
        return Verdict(False, f"{claimed}{reason}; set {settings.MPI_GPU.name}=on to skip the probe")
    proof = probe(device.index)
    return Verdict(proof.is_aware, f"{claimed}{proof.reason}")


def _has_ucx_of_cuda(maps: Path = Path("/proc/self/maps")) -> bool:
    """Return whether UCX has loaded its module for CUDA, which it does where there is a driver."""
    return "/libuct_cuda.so" in maps.read_text()


def _claim_of_library() -> Verdict | None:
    """Return the answer of the library's own query function; None if it has none."""
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)  # finds the functions of whichever MPI mpi4py has loaded
    if hasattr(library, name := "MPIX_Query_cuda_support"):
        is_aware = bool(library.MPIX_Query_cuda_support())
    elif hasattr(library, name := "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        is_aware = library.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer)) == 0 and bool(answer.value)
    else:
        return None
    return Verdict(is_aware, f"says {'yes' if is_aware else 'no'} ({name})")


def _judged(code: int, output: str) -> Verdict:
    """Return the verdict that follows from a probe's exit code and output."""
    if code == AWARE:
        return Verdict(True, "a probe sent device memory and got it back")
    if code == WRONG_VALUES:
        return Verdict(False, "a probe got wrong values")
    if code < 0:
        return Verdict(False, f"a probe died of {signal.Signals(-code).name}")
    lines = output.strip().splitlines() or ["it printed nothing"]
    return Verdict(False, f"a probe failed: {lines[-1].strip()}")


def _send_to_itself(device_index: int) -> int:
    """Return, as an exit code, whether MPI transfers device memory correctly: the program of the probe."""
    import cupy

    cupy.cuda.Device(device_index).use()
    from mpi4py import MPI

    for count in _COUNTS:
        source = cupy.arange(count, dtype="float32")
        target = cupy.zeros(count, dtype="float32")
        cupy.cuda.get_current_stream().synchronize()
        message, landing = (
            [MPI.buffer.fromaddress(array.data.ptr, array.nbytes), array.nbytes, MPI.BYTE] for array in (source, target)
        )
        request = MPI.COMM_SELF.Irecv(landing, 0)
        MPI.COMM_SELF.Send(message, 0)
        request.Wait()
        if not bool((source == target).all()):
            return WRONG_VALUES
    return AWARE


if __name__ == "__main__":
    sys.exit(_send_to_itself(int(sys.argv[1])))
