"""All lanes in one session: `lanes` says what there is and what runs at a time, `launches` how tests/ranks runs."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.launches", "tests.lanes"]

os.environ["MPISTRAT_STRICT"] = "1"
os.environ["MPISTRAT_TUNING"] = "off"  # what was measured on this machine changes no test
os.environ["MPISTRAT_MPI_GPU"] = "off"  # nobody asks the MPI library, and keeps the answer, but the test that does
os.environ["NCCL_IB_DISABLE"] = "1"  # auto takes no NCCL between nodes, also with InfiniBand, unless a test has it so
# ranks share the cores, and starting threads costs each process 80 ms
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPISTRAT_DEVICE"] = "cpu"  # what wants a GPU says so, also on a machine that has one

# The speed of a machine fails no example; limits are for what hangs.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def _variables() -> dict[str, str]:
    """Return what jobs of this process would read."""
    return {name: value for name, value in os.environ.items() if name.startswith(("MPISTRAT_", "NCCL_", "OMPI_MCA_"))}


@pytest.fixture(autouse=True)
def _no_test_leaves_variables_to_the_jobs_of_others() -> Iterator[None]:
    """Fail a test that does: with a timeline, for instance, calls wait for the GPU that otherwise do not."""
    before = _variables()
    yield
    if (left := _variables()) != before:
        for name in left:
            del os.environ[name]
        os.environ.update(before)
        pytest.fail(f"the test leaves {dict({*left.items()} - {*before.items()})}, and takes {sorted({*before} - {*left})}")
