"""What a machine has for a GPU's sake: GPUs, CUDA, CuPy, NCCL and MPI, and why not where it has none, as JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

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


if __name__ == "__main__":
    print(json.dumps(asdict(look())))
