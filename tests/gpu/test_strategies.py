"""Strategies and datasets on a real GPU: the tests that run on a stand-in elsewhere, with CuPy in its place."""

import pytest

from mpistrat.device import binding
from mpistrat.device.cuda import CudaDevice
from tests.unit.device.test_binding import *  # noqa: F403
from tests.unit.inputs.test_fetch import *  # noqa: F403


@pytest.fixture
def gpu():
    """Take the place of the fixture that binds a stand-in."""
    device = CudaDevice()
    device.use()
    binding.bind(device)
    yield device
    binding.bind(None)
