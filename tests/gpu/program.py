"""What probes have in common: what a machine has for a GPU's sake, where figures go, the GPU, and when it is through."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mpistrat
from mpistrat.device.binding import bound_device
from mpistrat.device.cuda import Device
from mpistrat.launch.environment import detect
from mpistrat.tools import info

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
    """Return what this machine has, as `mpistrat info` finds it: that asks for GPUs in another process."""
    found = info.gather()
    gpu, mpi, binding = found["gpu"], found["mpi"], found["gpu"].get("nccl binding", "")
    of_gpu = {"NCCL": gpu.get("nccl"), **{name: gpu.get(name) for name in ("CUDA", "CUDA driver")}}
    versions = {**found["versions"], "MPI": mpi.get("library"), **of_gpu}
    why = {
        "GPU": gpu.get("problem"),
        "MPI": mpi.get("problem"),
        "NCCL": gpu.get("nccl problem"),
        "nccl4py": binding != "nccl4py" and binding,
        "compute-sanitizer": not find_sanitizer() and "compute-sanitizer is not installed: it comes with CUDA's toolkit",
        "scikit-learn": find_spec("sklearn") is None and "the demo's images need scikit-learn: pip install '.[demo]'",
    }
    return Machine(gpu.get("gpus", []), _there(versions), _there(why))


def _there(texts: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if text}


def find_sanitizer() -> str:
    """Return where NVIDIA's compute-sanitizer is, or an empty text."""
    name = "compute-sanitizer"
    return shutil.which(name) or shutil.which(name, path=_TOOLKIT) or ""


STUCK_SECONDS = 20.0


def write_report(measure: Callable[..., Mapping[str, Any]]) -> None:
    """Call a function with the words of the command line; let the first rank write what it returns to ``--report FILE``."""
    *words, option, path = sys.argv[1:]
    assert option == "--report", "the last words must be --report FILE"
    found, view = measure(*words), detect()
    if view is None or not view.rank:
        Path(path).write_text(json.dumps(found))


def with_strategy(measure: Callable[[mpistrat.Strategy], Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a function finds with a strategy of all ranks, and how long it took."""
    strategy, begun = mpistrat.MultiWorkerMirroredStrategy(), time.monotonic()
    found = measure(strategy)
    strategy.close()
    return {**found, "seconds": round(time.monotonic() - begun, 1)}


def the_gpu() -> Device:
    device = bound_device()
    if device is None:
        raise mpistrat.errors.LaunchError("this process computes on its CPU; MPISTRAT_DEVICE=gpu says why")
    return device


def settle(device: Device) -> None:
    """Wait until all work on the current stream is through."""
    event, deadline = device.current_stream().record(), time.monotonic() + STUCK_SECONDS
    while not event.done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the GPU was not through after {STUCK_SECONDS:g} s")
