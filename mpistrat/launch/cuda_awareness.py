"""Whether MPI is CUDA-aware: by the setting, by the queries that the MPI library has, and by a probe.

If the library says no, that is the answer. If it says yes, or nothing, a probe in a separate process has to confirm it: builds
that claim to be CUDA-aware have been seen to crash. The answer is cached in one file per library.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mpistrat import cache, settings
from mpistrat.device.binding import bound_device
from mpistrat.launch.bootstrap import library_version
from mpistrat.launch.environment import without_launcher

PROBE_SECONDS = 60.0

# exit codes of the probe; and what it prints to stderr before the first message: a crash before it says nothing of messages
AWARE, WRONG_VALUES = 0, 3
STARTED = "MPI has started"

_COUNTS = (1 << 10, 1 << 21)  # MPI sends short and long messages by different protocols, eager and rendezvous

_TRANSPORT_VARIABLES = re.compile(r"OMPI_MCA_|UCX_|I_MPI_OFFLOAD|MPICH_|MPIR_CVAR_|MV2_|FI_")
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA


@dataclass(frozen=True)
class Library:
    """An MPI library and a GPU: everything that the verdict depends on."""

    path: str
    version: str
    modified: int  # in nanoseconds
    shaped_by: str = ""  # environment variables that affect how it transfers messages
    gpu: str = ""  # the name of the GPU, such as NVIDIA H200

    @property
    def file_name(self) -> str:
        """The name of its cache file."""
        return f"{cache.checksum(self)}.json"


@dataclass(frozen=True)
class Verdict:
    """Whether device memory is passed to MPI directly, and why."""

    is_aware: bool
    reason: str
    is_final: bool = True  # it may be cached, so that the next job need not probe again
    is_setting: bool = False  # the user has set it with MPISTRAT_MPI_GPU


def find_verdict() -> Verdict:
    """Return whether device memory is passed to the MPI library of this process. A GPU must be bound."""
    wanted = settings.MPI_GPU.read()
    if wanted != "auto":
        return Verdict(wanted == "on", f"{settings.MPI_GPU.name}={wanted}", is_setting=True)
    try:
        library = present_library()
        kept = _kept_for(library)
        if kept is not None:
            return kept
        verdict = _ask(library)
        if verdict.is_final:
            _keep(library, verdict)
        return verdict
    except Exception as error:  # a job does without
        return Verdict(False, f"the MPI library could not be queried ({type(error).__name__}: {error})", is_final=False)


def present_library() -> Library:
    """Return the MPI library of this process, with the GPU that is bound."""
    from mpi4py import MPI

    mapped = re.findall(r"(/\S*/libmpi[^/\s]*\.so[^/\s]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    path = Path(mapped[0] if mapped else MPI.__file__)
    device = bound_device()
    found = {name: value for name, value in without_launcher(os.environ).items() if _TRANSPORT_VARIABLES.match(name)}
    shaped_by = " ".join(f"{name}={value}" for name, value in sorted(found.items()))
    return Library(str(path), library_version(), path.stat().st_mtime_ns, shaped_by, device.identity().name if device else "")


def kept_verdicts() -> Iterator[tuple[Library, Verdict, str]]:
    """Yield the cached verdicts of earlier jobs of this user: library, verdict and date."""
    try:
        files = sorted(_folder().glob("*.json"))
    except RuntimeError:  # there is no home folder
        return
    for path in files:
        found = _read(path)
        if found is not None:
            yield found


def probe(device_index: int, seconds: float = PROBE_SECONDS) -> Verdict:
    """Start a process that sends device memory to itself by MPI, and return whether that worked; it may crash."""
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
        return Verdict(False, f"a probe did not end within {seconds:g} s", is_final=False)
    return _judged(process.returncode, output)


def _ask(library: Library) -> Verdict:
    claim = _claim_of_library()
    if claim is not None and not claim.is_aware:
        return Verdict(False, f"{library.version} {claim.reason}")
    device = bound_device()
    assert device is not None, "needs a GPU"
    claimed = f"{library.version} {claim.reason}, and " if claim else ""
    if device.is_exclusive():
        reason = (
            "the GPU is in EXCLUSIVE_PROCESS mode, so CUDA-awareness cannot be probed; "
            f"set {settings.MPI_GPU.name}=on to skip the probe"
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


def _judged(code: int, output: str) -> Verdict:
    """Return the verdict that follows from a probe's exit code and output."""
    if code == AWARE:
        return Verdict(True, "a probe sent device memory and got it back")
    if code == WRONG_VALUES:
        return Verdict(False, "a probe got wrong values")
    if code < 0:
        # a crash in a message is an answer; whatever else ends the probe, a launcher or the system, may not do so again
        is_final = -code in (signal.SIGSEGV, signal.SIGBUS) and STARTED in output
        return Verdict(False, f"a probe died of {signal.Signals(-code).name}", is_final)
    lines = output.strip().splitlines() or ["it printed nothing"]
    return Verdict(False, f"a probe failed: {lines[-1].strip()}", is_final=False)


def _kept_for(library: Library) -> Verdict | None:
    """Return the verdict that an earlier job has cached for a library; None if there is none."""
    try:
        found = _read(_folder() / library.file_name)
    except RuntimeError:  # there is no home folder
        return None
    return found[1] if found is not None and found[0] == library else None


def _keep(library: Library, verdict: Verdict) -> None:
    """Cache a verdict for later jobs, if the cache folder can be written."""
    document = {"library": asdict(library), "verdict": asdict(verdict), "date": datetime.date.today().isoformat()}
    try:
        cache.write(document, _folder() / library.file_name)
    except (OSError, RuntimeError):
        return  # the next job probes again


def _read(path: Path) -> tuple[Library, Verdict, str] | None:
    try:
        document = cache.read(path)
        library, verdict = cache.record(Library, document["library"]), cache.record(Verdict, document["verdict"])
        return library, verdict, str(document["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the library is probed again, and the file is overwritten


def _folder() -> Path:
    return cache.folder() / "cuda-aware"


def _send_to_itself(device_index: int) -> int:
    """Return, as an exit code, whether MPI transfers device memory correctly: the program of the probe."""
    import cupy

    cupy.cuda.Device(device_index).use()
    from mpi4py import MPI

    print(STARTED, file=sys.stderr, flush=True)
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
