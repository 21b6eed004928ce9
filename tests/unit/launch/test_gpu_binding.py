"""Which GPU a process binds, from what the launcher tells and CUDA shows."""

import re
import sys
from types import ModuleType

import pytest

from mpistrat.arrays import as_array
from mpistrat.device import cuda
from mpistrat.device.binding import bind, bound_device
from mpistrat.errors import InvalidArgumentError
from mpistrat.launch.bootstrap import bind_device, choose_device, what_is_bound
from mpistrat.launch.environment import LauncherView
from tests.gpu.fake_cuda import FakeCuda
from tests.gpu.stand_in import StandInDevice
from tests.other_arrays import CUDA, SpeaksDlpack


@pytest.fixture
def fake(monkeypatch):
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize(
    ("local_rank", "local_size", "num_visible", "index", "why"),
    [
        (0, 1, 1, 0, "the only GPU that this process sees"),
        (3, 4, 1, 0, "the only GPU that this process sees"),  # the scheduler has chosen
        (3, 4, 4, 3, "local rank 3 of 4 on a node with 4 GPUs"),
        (1, 2, 8, 1, "local rank 1 of 2 on a node with 8 GPUs"),
        (5, 8, 4, 1, "local rank 5 of 8 shares 4 GPUs: 5 mod 4"),
    ],
)
def test_the_device_is_chosen_by_the_place_on_the_node(local_rank, local_size, num_visible, index, why):
    assert choose_device(local_rank, local_size, num_visible) == (index, why)


def test_a_launcher_that_counts_no_ranks_of_the_node_or_tells_no_place(fake):
    fake.show(0, 1, 2)
    bind_device(LauncherView("a launcher", 2, 4, 2))
    assert (bound_device().index, what_is_bound().place) == (2, (2, 3))
    bind(None)
    bind_device(LauncherView("a PMIx launcher", 1))
    assert (bound_device().index, what_is_bound().launcher) == (0, ""), "which the peers correct"


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("cpu", ""),
        ("auto", ""),
        ("gpu", "MPISTRAT_DEVICE=gpu was set, but CuPy is not installed"),
        ("tpu", "auto, gpu, cpu are accepted"),
    ],
)
def test_without_a_gpu_auto_takes_the_cpu_and_all_else_is_a_problem_for_later(fake, monkeypatch, setting, problem):
    monkeypatch.setenv("MPISTRAT_DEVICE", setting)
    if setting == "cpu":
        monkeypatch.setattr("mpistrat.device.cuda.count_visible", lambda: pytest.fail("CUDA was asked"))
    bind_device(None)
    assert bound_device() is None
    assert problem in what_is_bound().problem
    assert bool(what_is_bound().problem) is bool(problem)
    assert problem or what_is_bound().why == {"auto": "CuPy is not installed", "cpu": "MPISTRAT_DEVICE=cpu"}[setting]


def test_a_gpu_that_cannot_be_used_is_a_problem_for_later(fake, monkeypatch):
    class Broken(StandInDevice):
        def __init__(self, index):
            self.index = index

        def use(self):
            raise RuntimeError("cudaErrorDevicesUnavailable")

    fake.show(0)
    monkeypatch.setattr("mpistrat.device.cuda.Device", Broken)
    bind_device(None)
    assert bound_device() is None
    told = "device 0 (the only GPU that this process sees) cannot be used: cudaErrorDevicesUnavailable"
    assert what_is_bound().problem == told


def _cupy(monkeypatch, count):
    """Plant a CuPy whose runtime counts like this."""
    monkeypatch.setattr(cuda, "find_spec", lambda name: name)
    monkeypatch.setattr(cuda, "_has_driver", lambda: True)
    cupy, inner, runtime = (ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.runtime"))
    cupy.cuda, inner.runtime, runtime.getDeviceCount, runtime.CUDARuntimeError = inner, runtime, count, RuntimeError
    for module in (cupy, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_gpus_are_counted_by_cupy_which_is_not_imported_without_a_driver(monkeypatch):
    def fail():
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    for count, found in (
        (lambda: 3, (3, "")),
        (lambda: 0, (0, "CUDA shows no GPU")),
        (fail, (0, "CUDA shows no GPU: cudaErrorInsufficientDriver: CUDA driver version is insufficient")),
    ):
        _cupy(monkeypatch, count)
        assert cuda.count_visible() == found
    monkeypatch.setitem(sys.modules, "cupy.cuda", ModuleType("cupy.cuda"))
    count, why = cuda.count_visible()
    assert count == 0
    assert why.startswith("CuPy cannot be imported: cannot import name 'runtime'")
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it would raise
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    assert cuda.count_visible() == (0, "CuPy is not installed: pip install '.[cuda12]' in the checkout, or cuda13")
    monkeypatch.setattr(cuda, "find_spec", lambda name: name)
    monkeypatch.setattr(cuda, "_has_driver", lambda: False)
    assert cuda.count_visible() == (0, "this machine has no NVIDIA driver (libcuda.so.1)")


@pytest.mark.parametrize(
    ("cause", "framed"),
    [
        (ImportError("libnvrtc.so.12: cannot open shared object file"), True),
        (ValueError("numpy.dtype size changed, may indicate binary incompatibility"), False),
    ],
)
def test_what_keeps_cupy_from_being_imported_is_said_not_the_frame_around_it(monkeypatch, cause, framed):
    class Finder:
        @staticmethod
        def find_spec(name, *_):
            if name == "cupy" and framed:
                raise ImportError("\n=====\nFailed to import CuPy.\n=====\n") from cause
            if name == "cupy":
                raise cause

    _cupy(monkeypatch, None)
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert cuda.count_visible() == (0, f"CuPy cannot be imported: {cause}")


@pytest.mark.parametrize(
    ("setting", "why"),
    [("auto", "CuPy is not installed: pip install '.[cuda12]' in the checkout, or cuda13"), ("cpu", "MPISTRAT_DEVICE=cpu")],
)
def test_who_passes_memory_of_a_gpu_is_told_why_this_process_has_none(monkeypatch, setting, why):
    monkeypatch.setenv("MPISTRAT_DEVICE", setting)
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    bind_device(None)
    message = rf"^x is on cuda:0, this replica computes on /cpu:0 \({re.escape(why)}\); copy it to host memory first$"
    with pytest.raises(InvalidArgumentError, match=message):
        as_array(SpeaksDlpack(0, CUDA), "x")
    with pytest.raises(InvalidArgumentError, match=r"^x is on rocm:0, this replica computes on /cpu:0; copy"):
        as_array(SpeaksDlpack(0, 10), "x")
