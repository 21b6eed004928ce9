"""Every kernel on arrays that begin at odd elements, in allocations that end with them, watched by NVIDIA's sanitizer.

That it finds nothing shows little, unless it finds a write that is planted.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from functools import reduce
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from mpistrat.device import cuda
from mpistrat.device.cuda import Device, DeviceArray, address
from mpistrat.device.kernels import TYPES, divide_kernel, fold_into_kernel, fold_kernel, move_kernel, real_dtype
from mpistrat.packing import DeviceCopyIn, DeviceCopyOut, Layout
from mpistrat.reduction import HALF_DTYPES, ReduceOp, accumulation_dtype, combine
from mpistrat.testing.transport_suite import operations
from tests.gpu.program import find_sanitizer, write_report
from tests.processes import run_bounded

TOOLS = ("memcheck", "initcheck", "racecheck")
OPTIONS = ("--report-api-errors", "no")  # what CUDA refuses, such as a query, is no access to memory
PADDING = ("--padding", "1024")  # CUDA puts one allocation behind the other: what is written beyond one lies in the next
TOOL_SECONDS = 70.0  # four of them end before the probe does
COUNTS = (1, 33, 4099)
PEERS = 3
BLOCKS = 2
F32 = np.dtype(np.float32)
PLANTED = 64
"""Elements that are written beyond the end of an allocation."""

_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def main() -> dict[str, int]:
    """Start the sanitizer's tools on this module, which runs the kernels."""
    return {f"{tool}_errors": _watched(tool) for tool in TOOLS} | {"planted_errors": _watched("memcheck", "planted")}


def try_all(device: Device) -> int:
    """Pack, unpack, fold and divide arrays of every dtype that begin at odd elements; return how many results were compared."""
    compared = 0
    for dtype, wide, op in _cases():
        arrays = [_values(dtype, count, index) for index, count in enumerate(COUNTS)]
        divided = _divided(device, wide) if op is ReduceOp.MEAN else ()
        for what, found, expected in (*_moved(device, arrays, wide), *_folded(device, wide, op), *divided):
            compared += 1
            if found.dtype != expected.dtype or found.tobytes() != expected.tobytes():
                raise AssertionError(f"{what} of {dtype} by {op.name} is not what NumPy makes of it")
    return compared


def kernels() -> list[str]:
    """Return the names of all kernels that `try_all` launches."""
    names = set()
    for dtype, wide, op in _cases():
        pair = [real_dtype(dtype), real_dtype(wide)]
        names |= {move_kernel(*pair), move_kernel(*reversed(pair)), fold_kernel(wide, op), fold_into_kernel(wide, op)}
        names |= {divide_kernel(wide)} if op is ReduceOp.MEAN else set()
    return sorted(names)


def errors_in(said: str) -> int:
    """Return how many errors, or hazards, the sanitizer has found."""
    found = _SUMMARY.search(said)
    if not found:
        raise AssertionError(f"the sanitizer says nothing of errors:\n{said[-3000:]}")
    return int(found[1])


def _be_subject(has_fault: bool) -> None:
    import cupy

    # one compilation, where a call at a time would take minutes beside the sanitizer
    source = (files("mpistrat.device") / "kernels.cu").read_text()
    names = [fold_into_kernel(F32, ReduceOp.SUM)] if has_fault else kernels()
    module = cupy.RawModule(code=source, options=("-std=c++17", "-lineinfo"), name_expressions=names)
    device = cuda.Device(0)
    with patch.object(cuda, "_kernel", module.get_function), device.activate(device.stream()):
        if has_fault:
            _write_beyond(device)
        else:
            print(f"{try_all(device)} results compared")


def _watched(tool: str, *more: str) -> int:
    program = [sys.executable, "-m", "tests.gpu.sanitizer", "subject", *more]
    options = (*OPTIONS, *(PADDING if tool == "memcheck" else ()))
    done = run_bounded([find_sanitizer(), "--tool", tool, *options, *program], TOOL_SECONDS, cwd=Path(__file__).parents[2])
    found = errors_in(done.stdout + done.stderr)
    if more and not found:
        raise AssertionError(f"{tool} overlooks a write beyond the end of an array: that it finds nothing else shows nothing")
    if not more and (found or done.returncode):
        print(f"{tool} ended with {done.returncode}", done.stdout[-3000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
    if not more and done.returncode:
        raise AssertionError(f"the kernels were not run to their end under {tool}: see above")
    return found


def _cases() -> Iterator[tuple[np.dtype[Any], np.dtype[Any], ReduceOp]]:
    """Return each dtype with those it is combined in, and each operation that is defined for it."""
    for dtype in TYPES:
        for op in operations(dtype):
            wide = accumulation_dtype(op, dtype)
            yield from ((dtype, held, op) for held in ((wide, dtype) if dtype in HALF_DTYPES else (wide,)))


def _moved(
    device: Device, arrays: Sequence[NDArray[Any]], wide: np.dtype[Any]
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Pack arrays into a bucket and take it apart again."""
    layout, dtypes = Layout([array.size for array in arrays]), [array.dtype for array in arrays]
    sources, targets = [_odd(device, array) for array in arrays], [_odd(device, np.zeros_like(array)) for array in arrays]
    bucket = _odd(device, np.zeros(layout.count, wide))
    for _ in DeviceCopyIn(device, layout, bucket, dtypes).run(sources):
        pass
    for _ in DeviceCopyOut(device, layout, [(0, layout.count, bucket)], 1, dtypes).run(targets):
        pass
    yield "a bucket", device.get(bucket), np.concatenate(arrays).astype(wide)
    for target, array in zip(targets, arrays, strict=True):
        yield "what was unpacked", device.get(target), array


def _folded(device: Device, dtype: np.dtype[Any], op: ReduceOp) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Fold the arenas of peers, and one array into another."""
    stream, fold, fold_into = device.current_stream(), fold_kernel(dtype, op), fold_into_kernel(dtype, op)
    for kernel in (fold, fold_into):
        device.prepare(kernel)
    for count in COUNTS:
        rows = [_values(dtype, count, seed) for seed in range(PEERS)]
        arenas = [_odd(device, row) for row in rows]
        table = device.allocate(8 * PEERS)
        device.put(table, np.array([address(arena) - dtype.itemsize for arena in arenas], np.uint64).view(np.uint8))
        target = _odd(device, np.zeros(count, dtype))
        folded = address(table), np.int32(PEERS), dtype.itemsize, address(target), count, np.int32(1)
        stream.launch(fold, BLOCKS, folded)
        yield "what peers hold", device.get(target), reduce(combine(op), rows)
        stream.launch(fold_into, BLOCKS, (address(arenas[0]), address(arenas[1]), count))
        yield "what arrived", device.get(arenas[0]), combine(op)(rows[0], rows[1])


def _divided(device: Device, dtype: np.dtype[Any]) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    real, kernel = real_dtype(dtype), divide_kernel(dtype)
    device.prepare(kernel)
    for count in COUNTS:
        values = _values(dtype, count, 0)
        target = _odd(device, (PEERS * values).astype(dtype))
        arguments = address(target), target.nbytes // real.itemsize, accumulation_dtype(ReduceOp.SUM, real).type(PEERS)
        device.current_stream().launch(kernel, BLOCKS, arguments)
        yield "what was divided", device.get(target), values


def _values(dtype: np.dtype[Any], count: int, seed: int) -> NDArray[Any]:
    """Return whole numbers, small enough to be added and multiplied without rounding."""
    return np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 5, count).astype(dtype)


def _odd(device: Device, values: NDArray[Any]) -> DeviceArray:
    """Return values on the device from the second element of an allocation on, which ends with them."""
    memory = device.allocate(values.nbytes + values.itemsize).view(values.dtype)
    device.put(memory, np.concatenate([values[:1], values]))
    return memory[1:]


def _write_beyond(device: Device) -> None:
    one, other = device.allocate(4096), device.allocate(4096 + 4 * PLANTED)
    for memory in (one, other):
        device.put(memory, np.zeros(memory.nbytes, np.uint8))
    kernel = fold_into_kernel(F32, ReduceOp.SUM)
    device.prepare(kernel)
    device.current_stream().launch(kernel, BLOCKS, (address(one), address(other), 1024 + PLANTED))
    device.get(other)


if __name__ == "__main__":
    if sys.argv[1] == "subject":
        _be_subject("planted" in sys.argv)
    else:
        write_report(main)
