"""The lab that tests of this lane share."""

import pytest

from tests.hosts.lab import Lab


@pytest.fixture(scope="session")
def lab():
    """Give four hosts on links of 1 Gbit/s."""
    with Lab(hosts=4, rate="1gbit") as hosts:
        yield hosts
