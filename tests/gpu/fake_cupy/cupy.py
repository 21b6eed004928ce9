"""As much of CuPy as the probe of an MPI library asks for, over memory of the host. FAKE_CUPY says what goes wrong."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

_FAULT = os.environ["FAKE_CUPY"]
_ELSEWHERE = np.zeros(1 << 21, "float32")


class _Array(np.ndarray):
    @property
    def data(self):
        nowhere, elsewhere = 8, _ELSEWHERE.ctypes.data
        return SimpleNamespace(ptr={"crash": nowhere, "wrong": elsewhere}.get(_FAULT, self.ctypes.data))


class _Device:
    def __init__(self, index):
        if _FAULT == "broken":
            raise RuntimeError(f"cudaErrorInvalidDevice: {index}")

    def use(self):
        if _FAULT == "stuck":
            time.sleep(600)
        kind, _, mark = _FAULT.partition(" ")
        if kind == "killed" and not Path(mark).exists():  # once
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)


cuda = SimpleNamespace(Device=_Device, get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None))


def arange(count, dtype):
    return np.arange(count, dtype=dtype).view(_Array)


def zeros(count, dtype):
    return np.zeros(count, dtype).view(_Array)
