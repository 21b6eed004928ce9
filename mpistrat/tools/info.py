"""mpistrat info: versions, the MPI library and how it was found, GPUs and settings. Starts no MPI."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from typing import Any

import mpistrat
from mpistrat import settings
from mpistrat.errors import LaunchError, MpistratError
from mpistrat.launch import environment, mpiexec
from mpistrat.settings import SETTINGS
from mpistrat.text import format_table

_SECONDS = 60.0

# runs in a separate process, because a broken CuPy or driver may crash it
_GPU = """
import json
from cupy.cuda import runtime
found = {"gpus": [runtime.getDeviceProperties(index)["name"].decode() for index in range(runtime.getDeviceCount())]}
for name, number in {"CUDA": runtime.runtimeGetVersion(), "CUDA driver": runtime.driverGetVersion()}.items():
    found[name] = f"{number // 1000}.{number // 10 % 100}"
from mpistrat.transports.nccl import NcclTransport
from mpistrat.transports.nccl_bindings import find_binding, nccl4py_refusal, version_text
if refusal := NcclTransport.probe(None):
    found["nccl problem"] = refusal
else:
    refusal = nccl4py_refusal()
    found["nccl"] = version_text(find_binding().get_version())
    found["nccl binding"] = f"CuPy's (nccl4py: {refusal})" if refusal else "nccl4py"
print(json.dumps(found))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show versions, the MPI library and how it was found, GPUs, and the settings."
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def execute(arguments: argparse.Namespace) -> int:
    found = gather()
    print(json.dumps(found, indent=1) if arguments.json else _report(found))
    return 0


def gather() -> dict[str, Any]:
    return {
        "versions": _versions(),
        "mpi": _mpi(),
        "launcher": _launcher(),
        "gpu": _gpu(),
        "settings": [_setting(setting) for setting in SETTINGS],
        "misspelt": settings.misspelt(),
    }


def _versions() -> dict[str, str]:
    packages = ("numpy", "mpi4py", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "cupy")
    found = {"mpistrat": mpistrat.__version__, "python": platform.python_version(), "system": platform.platform()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _mpi() -> dict[str, str]:
    try:
        found = mpiexec.find_mpi()
    except LaunchError as error:
        return {"problem": str(error)}
    named = os.environ.get("MPI4PY_LIBMPI") or os.environ.get("MPI4PY_MPIABI")
    return {
        "library": f"{found.flavour.name} {found.version}, {found.library}",
        "mpiexec": found.mpiexec,
        "found": f"by MPI4PY_LIBMPI or MPI4PY_MPIABI: {named}" if named else "by the search of mpi4py",
    }


def _launcher() -> str:
    try:
        view = environment.detect()
    except LaunchError as error:
        return str(error)
    return f"{view.launcher}: rank {view.rank} of {view.size}" if view else "none: this process is not a rank"


def _gpu() -> dict[str, Any]:
    if importlib.util.find_spec("cupy") is None:
        return {"problem": "CuPy is not installed"}
    try:
        done = subprocess.run([sys.executable, "-c", _GPU], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"CuPy did not answer within {_SECONDS:g} s"}
    if done.returncode:
        return {"problem": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _setting(setting: settings.Setting[Any]) -> dict[str, Any]:
    is_set = bool(os.environ.get(setting.name, "").strip())
    try:
        return {"name": setting.name, "value": setting.read(), "origin": "environment" if is_set else "default"}
    except MpistratError as error:
        return {"name": setting.name, "value": os.environ[setting.name], "origin": "environment", "problem": str(error)}


def _report(found: dict[str, Any]) -> str:
    gpu = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in found["gpu"].items()}
    used = [("setting", "value", "origin")]
    used += [
        (row["name"], _shown(row["value"]), row["origin"] + (f": {row['problem']}" if "problem" in row else ""))
        for row in found["settings"]
    ]
    parts = [
        format_table([*found["versions"].items()]),
        format_table([(f"MPI {name}", text) for name, text in found["mpi"].items()] + [("launcher", found["launcher"])]),
        format_table([(f"GPU {name}", str(text)) for name, text in gpu.items()]),
        format_table(used),
        "\n".join(settings.misspelt_text(name, near) for name, near in found["misspelt"].items()),
    ]
    return "\n\n".join(filter(None, parts))


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    return ("on" if value else "off") if isinstance(value, bool) else str(value) if value != "" else "empty"
