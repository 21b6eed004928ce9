"""The kernels of the device, compiled for every GPU generation that is supported: no GPU and no driver is needed for that."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100)
KERNELS = [
    "move_segments<float, bfloat16>",
    "move_segments<float16, float>",
    "move_segments<bfloat16, bfloat16>",
    "divide_values<float16>",
    "divide_values<long long>",
    "fold_peers<float, Sum>",
    "fold_peers<bfloat16, Max>",
    "fold_into<float, Sum>",
    "fold_into<bfloat16, Max>",
    "fold_into<Complex<double>, Prod>",
]


@pytest.fixture(scope="module")
def nvrtc():
    pytest.importorskip("cupy_backends", reason="missing CuPy; pip install '.[kernels]'", exc_type=ImportError)
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"missing NVIDIA's compiler library ({error}); pip install '.[kernels]'")
    return nvrtc


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_spilling_registers(nvrtc, architecture):
    source = (files("mpistrat.device") / "kernels.cu").read_text()
    program = nvrtc.createProgram(source, "kernels.cu", (), ())
    for kernel in KERNELS:
        nvrtc.addNameExpression(program, kernel)
    options = (f"-arch=sm_{architecture}", "-std=c++17", "--ptxas-options=-v")
    try:
        nvrtc.compileProgram(program, options)
    except Exception:
        pytest.fail(nvrtc.getProgramLog(program))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", nvrtc.getProgramLog(program))
    assert len(spills) >= len(KERNELS)
    assert {*spills} == {("0", "0")}
    assert len(nvrtc.getCUBIN(program)) > 1000
    nvrtc.destroyProgram(program)
