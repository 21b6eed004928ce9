"""The device kernels as C++ on the host: thread after thread, so that their arithmetic can be compared with NumPy's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

_SHIM = """
#define __global__
#define __device__
struct Index { unsigned int x; };
static Index blockIdx, threadIdx, gridDim;
"""
_FUNCTION = """
extern "C" void kernel_{number}(unsigned blocks, {parameters}) {{
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            {kernel}({arguments});
}}
"""
# of each kernel what its function is passed, and what that passes on
_KERNELS = {
    "move_segments": (
        "const Segment* segments, const uint32* first_tile, int count, long long divisor",
        "segments, first_tile, count, Wide<{dtype}>::type(divisor)",
    ),
    "fold_peers": (
        "const uint64* peers, int num_peers, uint64 first_byte, void* target, uint64 count, int first_peer",
        "peers, num_peers, first_byte, ({dtype}*)target, count, first_peer",
    ),
    "fold_into": ("void* target, const void* arrived, uint64 count", "({dtype}*)target, (const {dtype}*)arrived, count"),
    "divide_values": ("void* values, uint64 count, long long divisor", "({dtype}*)values, count, Wide<{dtype}>::type(divisor)"),
}
_TYPES = {"int": ctypes.c_int, "uint64": ctypes.c_uint64, "long": ctypes.c_longlong}


def missing() -> str:
    """Return why the kernels cannot be built for the host, or an empty text."""
    return "" if shutil.which("g++") else "missing the C++ compiler g++; apt-get install g++"


def source(kernels: Sequence[str]) -> str:
    """Return what the kernels are compiled from."""
    found = _SHIM + (files("mpistrat.device") / "kernels.cu").read_text()
    for number, kernel in enumerate(kernels):
        name, _, types = kernel.removesuffix(">").partition("<")
        parameters, arguments = _KERNELS[name]
        arguments = arguments.format(dtype=types.split(", ")[0])
        found += _FUNCTION.format(number=number, parameters=parameters, kernel=kernel, arguments=arguments)
    return found


class HostKernels:
    """The kernels as `build` has left them in a folder, by name."""

    def __init__(self, folder: Path, kernels: Sequence[str]) -> None:
        library = ctypes.CDLL(str(folder / "kernels.so"))
        self._functions = {kernel: library[f"kernel_{number}"] for number, kernel in enumerate(kernels)}
        for kernel, function in self._functions.items():
            parameters = _KERNELS[kernel.partition("<")[0]][0].split(", ")
            types = (ctypes.c_void_p if "*" in each else _TYPES[each.split()[0]] for each in parameters)
            function.argtypes = [ctypes.c_uint, *types]

    @classmethod
    def build(cls, folder: Path, kernels: Sequence[str]) -> HostKernels:
        """Compile the kernels into a library; skip the test where there is no compiler."""
        if missing():
            pytest.skip(missing())
        (folder / "kernels.cpp").write_text(source(kernels))
        command = ["g++", "-O0", "-std=c++17", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        subprocess.run([*command, "kernels.cpp", "-o", "kernels.so"], check=True, cwd=folder)
        return cls(folder, kernels)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Any]) -> None:
        """Run an instance of a kernel by its name on a device."""
        self._functions[kernel](blocks, *map(int, arguments))
