"""Work on a stand-in device that uses the same memory and is ordered by nothing: found in whatever order it happened to run.

Streams and the host have vector clocks: of each stream, the number of its pieces of work that come before. An event carries the
clock of its stream to whoever waits for it. Two pieces of work are a race if they use the same memory, one of them writes
there, and neither comes before the other. What the host reads and writes is not looked at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from mpistrat.device.kernels import TYPES
from tests.gpu import stand_in, stand_in_nccl

Clock = dict[int, int]
Ranges = list[tuple[int, int]]

_BYTES = {name: dtype.itemsize for dtype, name in TYPES.items()}
# what each verb of NCCL reads and writes: of its arguments, address and count; whether that counts for each rank
_VERBS = {
    "allReduce": ((0, 2, False), (1, 2, False)),
    "reduceScatter": ((0, 2, True), (1, 2, False)),
    "allGather": ((0, 2, False), (1, 2, True)),
    "broadcast": ((0, 2, False), (1, 2, False)),
}


class _Work(NamedTuple):
    stream: int
    number: int
    before: Clock
    what: str
    reads: Ranges
    writes: Ranges


class Races:
    """The `found` races of what is put on the streams of a device from now on; kernels other than copies are not looked at."""

    def __init__(self, patch: pytest.MonkeyPatch, device: stand_in.StandInDevice) -> None:
        self.found: set[str] = set()
        self._device, self._host = device, Clock()
        self._clocks: dict[int, Clock] = {}
        self._work: list[_Work] = []
        for name in ("copy", "clear", "launch", "record", "wait"):
            patch.setattr(stand_in._Stream, name, self._watched(getattr(stand_in._Stream, name), getattr(self, f"_{name}")))
        patch.setattr(stand_in._Event, "done", self._watched(stand_in._Event.done, self._done))
        for verb, places in _VERBS.items():
            call = self._watched(getattr(stand_in_nccl._Communicator, verb), self._nccl(verb, *places))
            patch.setattr(stand_in_nccl._Communicator, verb, call)

    def _watched(self, method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(of: Any, *arguments: Any) -> Any:
            if method is not stand_in._Event.done and note != self._record:
                note(of, *arguments)
            result = method(of, *arguments)
            return result

        return call
