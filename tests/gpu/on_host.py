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
_MOVE = """
extern "C" void move_{name}(unsigned blocks, const Segment* segments, const uint32* first_tile, int count, long long divisor) {{
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            {kernel}(segments, first_tile, count, Wide<{source}>::type(divisor));
}}
"""
_FOLD = """
extern "C" void fold_{name}(unsigned blocks, const uint64* peers, int num_peers, uint64 first_byte, void* target,
                            uint64 count, int first_peer, uint64 part_count, uint64 start) {{
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            {kernel}(peers, num_peers, first_byte, ({dtype}*)target, count, first_peer, part_count, start);
}}
"""
_FOLD_INTO = """
extern "C" void fold_{name}(unsigned blocks, void* target, const void* arrived, uint64 count) {{
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            {kernel}(({dtype}*)target, (const {dtype}*)arrived, count);
}}
"""
_DIVIDE = """
extern "C" void fold_{name}(unsigned blocks, void* values, uint64 count, long long divisor) {{
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            {kernel}(({dtype}*)values, count, Wide<{dtype}>::type(divisor));
}}
"""
_TEMPLATES = {"fold_peers": _FOLD, "fold_into": _FOLD_INTO, "divide_values": _DIVIDE}


def missing() -> str:
    """Return why the kernels cannot be built for the host, or an empty text."""
    return "" if shutil.which("g++") else "missing the C++ compiler g++; apt-get install g++"


def text() -> str:
    """Return what the kernels are compiled from."""
    return _SHIM + (files("mpistrat.device") / "kernels.cu").read_text()


class HostKernels:
    """The kernels as `build` has left them in a folder, by name; `folds` are of `fold_peers`, `fold_into`, `divide_values`."""

    def __init__(self, folder: Path, moves: Sequence[str], folds: Sequence[str]) -> None:
        self._moves = {kernel: f"move_{index}" for index, kernel in enumerate(moves)}
        self._folds = {kernel: f"fold_{index}" for index, kernel in enumerate(folds)}
        self._library = ctypes.CDLL(str(folder / "kernels.so"))

    @classmethod
    def build(cls, folder: Path, moves: Sequence[str], folds: Sequence[str]) -> HostKernels:
        """Compile the kernels into a library; skip the test where there is no compiler."""
        if missing():
            pytest.skip(missing())
        source_text = text()
        for index, kernel in enumerate(moves):
            source, _, _ = kernel.removeprefix("move_segments<").partition(", ")
            source_text += _MOVE.format(name=index, source=source, kernel=kernel)
        for index, kernel in enumerate(folds):
            name, _, arguments = kernel.removesuffix(">").partition("<")
            source_text += _TEMPLATES[name].format(name=index, dtype=arguments.split(", ")[0], kernel=kernel)
        (folder / "kernels.cpp").write_text(source_text)
        command = ["g++", "-O0", "-std=c++17", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        subprocess.run([*command, "kernels.cpp", "-o", "kernels.so"], check=True, cwd=folder)
        return cls(folder, moves, folds)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Any]) -> None:
        """Run an instance of a kernel by its name on a device."""
        if kernel in self._moves:
            segments, first_tile, count, divisor = map(int, arguments)
            run = self._library[self._moves[kernel]]
            run(blocks, ctypes.c_void_p(segments), ctypes.c_void_p(first_tile), count, ctypes.c_longlong(divisor))
            return
        run = self._library[self._folds[kernel]]
        if kernel.startswith("fold_into<"):
            target, arrived, count = map(int, arguments)
            run(blocks, ctypes.c_void_p(target), ctypes.c_void_p(arrived), ctypes.c_uint64(count))
            return
        if kernel.startswith("divide_values<"):
            values, count, divisor = map(int, arguments)
            run(blocks, ctypes.c_void_p(values), ctypes.c_uint64(count), ctypes.c_longlong(divisor))
            return
        peers, num_peers, first_byte, target, count, first_peer, part_count, start = map(int, arguments)
        where = ctypes.c_void_p(peers), num_peers, ctypes.c_uint64(first_byte), ctypes.c_void_p(target), ctypes.c_uint64(count)
        run(blocks, *where, first_peer, ctypes.c_uint64(part_count), ctypes.c_uint64(start))
