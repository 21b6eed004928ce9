"""What is asked of CuPy is what CuPy has, and its arrays are understood: as far as that can be known without a GPU."""

import ast
import importlib
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.device import cuda
from mpistrat.device.cuda import address
from mpistrat.packing import DeviceCopyIn, DeviceCopyOut, Layout
from tests.gpu.on_host import HostKernels
from tests.gpu.stand_in import StandInDevice

PACKAGE = Path(mpistrat.__file__).parent
SIGNATURES = {
    "cuda.runtime.malloc": "size",
    "cuda.runtime.free": "ptr",
    "cuda.runtime.ipcGetMemHandle": "devPtr",
    "cuda.runtime.ipcOpenMemHandle": "bytes handle, unsigned int flags",
    "cuda.runtime.ipcCloseMemHandle": "devPtr",
    "cuda.runtime.memsetAsync": "ptr, int value, size_t size, intptr_t stream",
    "cuda.runtime.memcpyAsync": "dst, intptr_t src, size_t size, int kind, intptr_t stream",
    "cuda.runtime.eventQuery": "event",
    "cuda.runtime.check_status": "status",
    "cuda.UnownedMemory": "intptr_t ptr, size_t size, owner, int device_id",
    "cuda.MemoryPointer": "BaseMemory mem, ptrdiff_t offset",
    "RawModule": "str code=None, *, str path=None, tuple options=(), str backend='nvrtc', bool translate_cucomplex=False, "
    "bool enable_cooperative_groups=False, name_expressions=None",
    "RawModule.get_function": "name",
    "RawKernel.__call__": "grid, block, args, **kwargs",
}


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy", reason="missing CuPy; pip install '.[kernels]'", exc_type=ImportError)


@pytest.fixture
def on_host_memory(cupy):
    """Give a function that makes an array of CuPy on memory of the host: what needs no driver works with it."""

    def make(values):
        raw = values.view(np.uint8)
        return cuda.Device(0)._array(_Lent(raw), raw.nbytes).view(values.dtype)

    return make


class _Lent:
    def __init__(self, memory):
        self.memory, self.start = memory, memory.ctypes.data


@pytest.mark.parametrize("name", SIGNATURES)
def test_functions_of_cupy_take_what_they_are_given(cupy, name):
    assert SIGNATURES[name] in (reduce(getattr, name.split("."), cupy).__doc__ or "")


def test_every_name_of_cupy_that_is_used_exists(cupy):
    used = {(path, name) for path in PACKAGE.rglob("*.py") for name in _names_of_cupy(path)}
    assert len(used) > 10
    for path, name in sorted(used):
        module, *attributes = name.split(".")
        assert _resolves(importlib.import_module(module), attributes), f"{path.relative_to(PACKAGE)} uses {name}"


def _names_of_cupy(path):
    """Return every dotted name in a module that begins with what it imports of CuPy."""
    tree = ast.parse(path.read_text())
    roots = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in ("cupy", "cupyx")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("cupy", "cupyx"):
            roots |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.value or node.target).startswith("LazyModule('cupy"):
            roots[ast.unparse(node.target)] = ast.literal_eval(node.value.args[0]).replace(":", ".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in roots and rest.replace(".", "").isidentifier():
                yield f"{roots[root]}.{rest}"


def _resolves(thing, attributes):
    for index, attribute in enumerate(attributes):
        if not hasattr(thing, attribute):
            # modules below `cupy.cuda` are imported when they are needed, and NCCL may not be there
            return attributes[:2] == ["cuda", "nccl"] and index >= 1
        thing = getattr(thing, attribute)
    return True


def test_arrays_of_cupy_lead_to_their_memory(on_host_memory):
    host = np.arange(64, dtype=np.float32)
    array = on_host_memory(host)
    assert address(array) == host.ctypes.data
    assert address(array[3:9]) == host[3:9].ctypes.data
    assert address(array[8:].view(ml_dtypes.bfloat16)) == host[8:].ctypes.data
    assert address(array[64:]) == host.ctypes.data + host.nbytes


def test_arrays_of_cupy_are_packed_and_unpacked(on_host_memory, tmp_path):
    kernels = ["move_segments<float, bfloat16>", "move_segments<bfloat16, float>"]
    device = StandInDevice()
    device.kernels = HostKernels.build(tmp_path, kernels)
    host = [np.arange(count, dtype=np.float32) for count in (40, 0, 7)]
    layout = Layout([array.size for array in host])
    buffer = device.allocate(2 * layout.count).view(ml_dtypes.bfloat16)
    dtypes = [array.dtype for array in host]
    list(DeviceCopyIn(device, layout, buffer, dtypes).run([on_host_memory(array) for array in host]))
    results = [np.zeros_like(array) for array in host]
    copy = DeviceCopyOut(device, layout, [(0, layout.count, buffer)], 2, dtypes)
    list(copy.run([on_host_memory(array) for array in results]))
    device.get(buffer)
    for array, result in zip(host, results, strict=True):
        np.testing.assert_array_equal(result, array / 2)
    device.close()


@pytest.fixture
def capture_mode(monkeypatch):
    """Give the capture mode of this thread: cudaStreamCaptureModeGlobal, in which a query disturbs captures of others."""
    mode = [0]

    class Driver:
        @staticmethod
        def cuThreadExchangeStreamCaptureMode(pointer):  # noqa: N802 - the name of CUDA
            pointer._obj.value, mode[0] = mode[0], pointer._obj.value
            return 0

    monkeypatch.setattr(cuda, "_driver", Driver)
    return mode


def test_an_event_is_done_or_is_not_or_the_gpu_has_failed_and_a_query_disturbs_no_capture(cupy, monkeypatch, capture_mode):
    for status, answer in ((0, True), (600, False)):
        monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event, status=status: status)
        assert cuda.Event(_Native()).done() is answer
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event: 700)
    message = "the GPU has failed: cudaErrorIllegalAddress.*cannot be used any more in this process"
    with pytest.raises(mpistrat.errors.TransportError, match=message):
        cuda.Event(_Native()).done()
    modes = []

    def query(event):
        modes.append(list(capture_mode))
        raise RuntimeError("planted")

    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", query)
    with pytest.raises(RuntimeError):
        cuda.Event(_Native()).done()
    assert (modes, capture_mode) == ([[cupy.cuda.runtime.streamCaptureModeRelaxed]], [0])


class _Native:
    ptr = 1


@pytest.mark.parametrize("status", [0, 100])
def test_a_uuid_is_not_cut_at_a_zero_byte(monkeypatch, status):
    class Driver:
        cuInit = cuDeviceGet = staticmethod(lambda *_: 0)  # noqa: N815 - the names of CUDA

        @staticmethod
        def cuDeviceGetUuid_v2(uuid, device):  # noqa: N802
            uuid[:] = [0x47, 0, 0x11, *range(13)]
            return status

    monkeypatch.setattr(cuda, "_driver", Driver)
    assert cuda._uuid(0) == ("" if status else "470011" + bytes(range(13)).hex())


def test_memory_is_given_back_on_its_own_gpu():
    steps = []

    class Device(StandInDevice):
        @contextmanager
        def activate(self, stream=None):
            steps.append("in")
            yield
            steps.append("out")

    memory = cuda._Memory(4096, lambda start: steps.append(start), Device())
    del memory
    assert steps == ["in", 4096, "out"]
