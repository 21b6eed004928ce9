"""Everything that is known only of a real GPU: each probe is one test, in a session of its own with a deadline.

On one GPU several ranks share it, as virtual nodes. Tests of strategies and datasets, which run on a stand-in elsewhere, have
CuPy in its place.
"""

import pytest

from mpistrat.device import binding
from mpistrat.device.cuda import Device
from tests.gpu.probes import PROBES
from tests.gpu.program import look
from tests.unit.device.test_binding import *  # noqa: F403
from tests.unit.inputs.test_fetch import *  # noqa: F403


@pytest.fixture
def gpu():
    """Take the place of the fixture that binds a stand-in."""
    device = Device()
    device.use()
    binding.bind(device)
    yield device
    binding.bind(None)


@pytest.fixture(scope="module")
def machine():
    found = look()
    print(found)
    return found


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_probe(machine, probe, monkeypatch):
    monkeypatch.delenv("MPISTRAT_MPI_GPU")  # here MPI is asked
    if refusal := probe.refusal(machine):
        pytest.skip(refusal)
    figures = probe.run()
    print(figures)
    if "skipped" in figures:
        pytest.skip(str(figures["skipped"]))
    if missed := probe.missed(figures):
        pytest.skip(f"it works; {', '.join(missed)} is a goal that was missed: {figures}")
