"""What CUDA would show to a process: so many GPUs, of one machine or another, whose memory is that of the stand-in."""

import pytest

from mpistrat.device import binding
from mpistrat.device.cuda import Identity
from mpistrat.launch import bootstrap
from tests.gpu.stand_in import StandInDevice


class FakeCuda:
    """GPUs that a process sees; undone by the monkeypatch that it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers: list[int] = []
        self.missing = "CuPy is not installed"
        self.used: list[int] = []
        monkeypatch.setattr("mpistrat.device.cuda.count_visible", lambda: (len(self.numbers), self.missing))
        monkeypatch.setattr("mpistrat.device.cuda.Device", self.device)
        monkeypatch.setattr(binding, "_bound", None)
        monkeypatch.setattr(bootstrap, "_bound", None)
        monkeypatch.setenv("MPISTRAT_DEVICE", "auto")

    def show(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def device(self, index: int) -> StandInDevice:
        number, fake = self.numbers[index], self

        class Device(StandInDevice):
            def identity(self) -> Identity:
                return Identity("NVIDIA H200", f"{number + 1:032x}", f"0000:{number + 0x17:02x}:00.0")

            def use(self) -> None:
                fake.used.append(index)

        return Device(index=index)
