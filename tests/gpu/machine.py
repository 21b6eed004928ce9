"""What a machine has for a GPU's sake: GPUs, CUDA, CuPy, NCCL and MPI, and why not where it has none.

    python -m tests.gpu.machine      # prints it as JSON

It is asked in a process of its own: whoever has touched CUDA once cannot let go of it again.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from mpistrat.device.cuda import count_visible
from mpistrat.errors import LaunchError
from mpistrat.launch.mpiexec import find_mpi
from mpistrat.transports.nccl_bindings import nccl4py_refusal, version_text
from tests.processes import run_bounded

LOOK_SECONDS = 60.0
_DRIVER = Path("/proc/driver/nvidia/version")
_TOOLKIT = "/usr/local/cuda/bin"


@dataclass(frozen=True)
class Machine:
    """What was found: the names of GPUs, versions, and why there is no GPU, NCCL, MPI, scikit-learn or compute-sanitizer."""

    gpus: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def nccl(self) -> tuple[int, ...]:
        """The version of NCCL as numbers; empty where there is none."""
        return tuple(int(part) for part in self.versions.get("NCCL", "").split(".") if part)


def look() -> Machine:
    """Return what this machine has, asked in another process."""
    done = run_bounded([sys.executable, "-m", "tests.gpu.machine"], LOOK_SECONDS, cwd=Path(__file__).parents[2])
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Machine(missing={"GPU": f"who looked for GPUs ended with {done.returncode}: {last}"})
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


def driver_version(text: str) -> dict[str, str]:
    """Return the version of NVIDIA's driver in what the kernel says of it; nothing where it says nothing."""
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return {"NVIDIA driver": match[1]} if match else {}


def find_sanitizer() -> str:
    """Return where NVIDIA's compute-sanitizer is, or an empty text."""
    name = "compute-sanitizer"
    return shutil.which(name) or shutil.which(name, path=_TOOLKIT) or ""


def main() -> None:
    """Print what this machine has."""
    machine = Machine(versions={"Python": platform.python_version()})
    count, why = count_visible()
    if count:
        _ask_cuda(machine, count)
    else:
        machine.missing["GPU"] = why
    try:
        mpi = find_mpi()
        machine.versions[mpi.flavour.name] = mpi.version
    except LaunchError as error:
        machine.missing["MPI"] = f"{error}"
    if not find_sanitizer():
        machine.missing["compute-sanitizer"] = "compute-sanitizer is not installed: it comes with CUDA's toolkit"
    if find_spec("sklearn") is None:
        machine.missing["scikit-learn"] = "the demo's images need scikit-learn: pip install '.[demo]'"
    print(json.dumps(asdict(machine)))


def _ask_cuda(machine: Machine, count: int) -> None:
    import cupy
    from cupy.cuda import nccl, runtime

    machine.gpus.extend(runtime.getDeviceProperties(index)["name"].decode() for index in range(count))
    numbers = {"CUDA driver": runtime.driverGetVersion(), "CUDA run time": runtime.runtimeGetVersion()}
    versions = {name: f"{number // 1000}.{number // 10 % 100}" for name, number in numbers.items()}
    machine.versions.update({"CuPy": cupy.__version__, **versions})
    machine.versions.update(driver_version(_DRIVER.read_text() if _DRIVER.exists() else ""))
    if nccl.available:
        machine.versions["NCCL"] = version_text(nccl.get_version())
    else:
        machine.missing["NCCL"] = "CuPy finds no libnccl.so.2; pip install '.[cuda12]' in the checkout, or cuda13"
    if why := nccl4py_refusal():
        machine.missing["nccl4py"] = f"nccl4py cannot be used: {why}"
    else:
        machine.versions["nccl4py"] = version("nccl4py")


if __name__ == "__main__":
    main()
