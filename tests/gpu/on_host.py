"""The device kernels as C++ on the host: thread after thread, so that their arithmetic can be compared with NumPy's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.device.kernels import TYPES

__all__ = ["HostKernels", "missing"]

_SHIM = """
#define __global__
#define __device__
struct Index { unsigned int x; };
static Index blockIdx, threadIdx, gridDim;
"""
_MOVE = """
extern "C" void move_{name}(const Segment* segments, const uint32* first_tile, int count, unsigned blocks, long long divisor) {{
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            move_segments<{source}, {target}>(segments, first_tile, count, Wide<{source}>::type(divisor));
}}
"""
_FOLD = """
extern "C" void fold_{name}(unsigned blocks, const uint64* peers, int num_peers, uint64 first_byte, void* target,
                            uint64 count) {{
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            {kernel}(peers, num_peers, first_byte, ({dtype}*)target, count);
}}
"""


def missing() -> str:
    """Return why the kernels cannot be built for the host, or an empty text."""
    return "" if shutil.which("g++") else "missing the C++ compiler g++; apt-get install g++"


class HostKernels:
    """The kernels as `build` has left them in a folder; `folds` are names of instances of `fold_peers`."""

    def __init__(self, folder: Path, folds: Sequence[str]) -> None:
        self._folds = {kernel: f"fold_{index}" for index, kernel in enumerate(folds)}
        self._library = ctypes.CDLL(str(folder / "kernels.so"))

    @staticmethod
    def build(folder: Path, moves: Sequence[tuple[np.dtype, np.dtype]], folds: Sequence[str]) -> None:
        """Compile the kernels into a library."""
        text = _SHIM + (files("mpistrat.device") / "kernels.cu").read_text()
        for source, target in moves:
            text += _MOVE.format(name=f"{source}_{target}", source=TYPES[source], target=TYPES[target])
        for index, kernel in enumerate(folds):
            dtype, _, _ = kernel.removeprefix("fold_peers<").rpartition(", ")
            text += _FOLD.format(name=index, dtype=dtype, kernel=kernel)
        (folder / "kernels.cpp").write_text(text)
        command = ["g++", "-O0", "-std=c++17", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        subprocess.run([*command, "kernels.cpp", "-o", "kernels.so"], check=True, cwd=folder)

    def move(self, segments: np.ndarray, first_tile: np.ndarray, blocks: int, dtypes: tuple, divisor: int = 1) -> None:
        """Run `move_segments`; `segments` has rows of source address, target address and count."""
        run = self._library[f"move_{dtypes[0]}_{dtypes[1]}"]
        run(
            ctypes.c_void_p(segments.ctypes.data),
            ctypes.c_void_p(first_tile.ctypes.data),
            len(segments),
            blocks,
            ctypes.c_longlong(divisor),
        )

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Any]) -> None:
        """Run an instance of `fold_peers` by its name on a device."""
        peers, num_peers, first_byte, target, count = arguments
        self._library[self._folds[kernel]](
            blocks,
            ctypes.c_void_p(int(peers)),
            int(num_peers),
            ctypes.c_uint64(int(first_byte)),
            ctypes.c_void_p(int(target)),
            ctypes.c_uint64(int(count)),
        )
