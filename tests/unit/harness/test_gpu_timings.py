"""The timings of a GPU, on the stand-in device: they move what they say, and give every figure that has a goal."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu import timings
from tests.gpu.on_host import HostKernels
from tests.gpu.probes import PROBES
from tests.gpu.stand_in import StandInDevice
from tests.gpu.timings import TIMINGS, Sizes

MOVES = ["move_segments<float, bfloat16>", "move_segments<bfloat16, float>", "move_segments<float, float>"]
FOLDS = ["fold_peers<float, Sum>"]
SMALL = Sizes(nbytes=1 << 13, shapes=((3, 5), (7,), ()), sets=2, runs=1, fillers=2, rounds=2)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return HostKernels.build(tmp_path_factory.mktemp("kernels"), MOVES, FOLDS)


@pytest.mark.parametrize("name", TIMINGS)
def test_a_timing_gives_the_figures_that_have_goals(kernels, name):
    device = StandInDevice()
    device.kernels = kernels
    figures = TIMINGS[name](timings._Bench(device, SMALL))
    [probe] = [probe for probe in PROBES if probe.command[:2] == ("tests.gpu.timings", name)]
    assert probe.least
    assert probe.least.keys() <= figures.keys()
    assert all(np.isfinite(value) for value in figures.values())
    device.close()
