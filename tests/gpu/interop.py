"""Arrays of PyTorch and JAX in the memory of GPUs, through a strategy: the right values, and the kind of array that was sent.

JAX takes most of the GPU's memory for itself unless XLA_PYTHON_CLIENT_PREALLOCATE=false is set.
"""

import importlib.util
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import mpistrat
from tests.gpu import verbs_rank
from tests.gpu.program import with_strategy, write_report
from tests.other_arrays import tensor

DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
DELAY_CYCLES = 200_000_000  # about a tenth of a second


class Kind:
    """A library whose arrays are tried.

    `missing` returns why there are no such arrays on the device, or an empty text; `make` returns an array of values; `read`
    returns the values of what must be such an array, on that device.
    """

    can_be_written = True

    def __init__(self, device: str = "gpu") -> None:
        self.device = device

    def late(self, values: NDArray[Any]) -> Any:
        """Return an array whose values are written late, by work that is under way."""
        return self.make(values)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Return a context in which the library computes on a stream that is not the default one."""
        return nullcontext()


class Torch(Kind):
    def missing(self) -> str:
        if importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed"
        import torch

        return "PyTorch sees no GPU" if self.device == "gpu" and not torch.cuda.is_available() else ""

    def make(self, values: NDArray[Any]) -> Any:
        import torch

        return tensor(torch, values).to(self._name)

    def read(self, array: Any) -> NDArray[Any]:
        import torch

        assert isinstance(array, torch.Tensor), f"a tensor was sent, and {type(array)} came back"
        assert array.device.type == self._name, f"a tensor on {self._name} was sent, and one on {array.device} came back"
        host = array.cpu()
        return host.numpy() if host.dtype is not torch.bfloat16 else host.view(torch.int16).numpy().view(DTYPES[1])

    def late(self, values: NDArray[Any]) -> Any:
        import torch

        ready = self.make(values)
        array = torch.zeros_like(ready)
        if self.device == "gpu":
            torch.cuda.synchronize()
            torch.cuda._sleep(DELAY_CYCLES)
        array.copy_(ready)
        return array

    def on_stream(self) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.stream(torch.cuda.Stream()) if self.device == "gpu" else nullcontext()

    @property
    def _name(self) -> str:
        return "cuda" if self.device == "gpu" else "cpu"


class Jax(Kind):
    can_be_written = False

    def missing(self) -> str:
        if importlib.util.find_spec("jax") is None:
            return "JAX is not installed"
        import jax

        try:
            jax.devices(self.device)
        except RuntimeError as error:
            return f"JAX: {error}"
        return ""

    def make(self, values: NDArray[Any]) -> Any:
        import jax

        return jax.device_put(values, jax.devices(self.device)[0])

    def read(self, array: Any) -> NDArray[Any]:
        import jax

        assert isinstance(array, jax.Array), f"a JAX array was sent, and {type(array)} came back"
        [device] = array.devices()
        assert (device.platform == "cpu") == (self.device == "cpu"), f"the array came back on {device}"
        return np.asarray(array)

    def late(self, values: NDArray[Any]) -> Any:
        import jax

        array = self.make(values)
        if self.device == "cpu":
            return array
        busy = jax.numpy.ones((4096, 4096), np.float32, device=array.device)
        for _ in range(20):
            busy = busy @ busy * 1e-4
        return array + (busy[0, 0] * 0).astype(array.dtype)


KINDS: dict[str, type[Kind]] = {"torch": Torch, "jax": Jax}


def main(library: str) -> dict[str, Any]:
    """Try the arrays of a library. A collective call."""
    kind = KINDS[library]()

    def found(strategy: mpistrat.Strategy) -> dict[str, Any]:
        missing = kind.missing()
        return {"skipped": missing} if missing else check(strategy, kind)

    return with_strategy(found)


def check(strategy: mpistrat.Strategy, kind: Kind) -> dict[str, float]:
    """Send arrays through all verbs, also such as are written late; return how many were compared. A collective call."""

    def run() -> tuple[int, list[str]]:
        compared, problems = 0, []
        for way, make, where in (
            ("", kind.make, nullcontext()),
            (", written late", kind.late, nullcontext()),
            (", written late on another stream", kind.late, kind.on_stream()),
        ):
            for dtype in DTYPES:
                for what, call, expected in verbs_rank.cases(strategy, dtype, make, kind.can_be_written):
                    try:
                        with where:
                            compared += verbs_rank.compare(what, call(), expected, kind.read)
                    except Exception as error:  # the next case may tell more
                        place = traceback.extract_tb(error.__traceback__)[-1]
                        problems.append(f"{what}{way}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})")
        return compared, problems

    [(compared, problems)] = strategy.experimental_local_results(strategy.run(run))
    if problems:
        raise AssertionError("\n".join([f"{len(problems)} of the cases failed:", *problems]))
    return {"compared": compared}


if __name__ == "__main__":
    write_report(main)
