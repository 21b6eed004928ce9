"""The device kernels as C++ on the host: thread after thread, so that their arithmetic can be compared with NumPy's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import ml_dtypes
import numpy as np

__all__ = ["NAMES", "HostKernels", "missing"]

NAMES = {
    np.dtype(np.int8): "signed char",
    np.dtype(np.uint8): "uint8",
    np.dtype(np.int32): "int",
    np.dtype(np.int64): "long long",
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.float16): "float16",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
}

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
extern "C" void fold_{name}(const Peers* peers, int num_peers, uint64 start, void* target, uint64 count, unsigned blocks) {{
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            fold_peers<{dtype}, {op}>(*peers, num_peers, start, ({dtype}*)target, count);
}}
"""


def missing() -> str:
    """Return why the kernels cannot be built for the host, or an empty text."""
    return "" if shutil.which("g++") else "missing the C++ compiler g++; apt-get install g++"


class HostKernels:
    """The kernels for certain dtypes, built once."""

    def __init__(self, folder: Path, moves: Sequence[tuple[np.dtype, np.dtype]], folds: Sequence[tuple[np.dtype, str]]) -> None:
        text = _SHIM + (files("mpistrat.packing") / "kernels.cu").read_text()
        for source, target in moves:
            text += _MOVE.format(name=f"{source}_{target}", source=NAMES[source], target=NAMES[target])
        for dtype, op in folds:
            text += _FOLD.format(name=f"{dtype}_{op}", dtype=NAMES[dtype], op=op)
        (folder / "kernels.cpp").write_text(text)
        build = ["g++", "-O1", "-std=c++17", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        subprocess.run([*build, "kernels.cpp", "-o", "kernels.so"], check=True, cwd=folder)
        self._library = ctypes.CDLL(str(folder / "kernels.so"))

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

    def fold(self, buffers: Sequence[np.ndarray], start: int, target: np.ndarray, op: str, blocks: int = 3) -> None:
        """Run `fold_peers` on the range of `buffers` that begins at `start` and is as long as `target`."""
        peers = (ctypes.c_uint64 * 16)(*[buffer.ctypes.data for buffer in buffers])
        run = self._library[f"fold_{target.dtype}_{op}"]
        run(
            ctypes.byref(peers),
            len(buffers),
            ctypes.c_uint64(start),
            ctypes.c_void_p(target.ctypes.data),
            ctypes.c_uint64(target.size),
            blocks,
        )
