"""All lanes in one session: `lanes` says what there is and what runs at a time, `launches` how tests/ranks runs."""

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.launches", "tests.lanes"]

os.environ["MPISTRAT_STRICT"] = "1"
os.environ["MPISTRAT_TUNING"] = "off"  # what was measured on this machine changes no test
os.environ["MPISTRAT_MPI_GPU"] = "off"  # nobody asks the MPI library, and keeps the answer, but the test that does
os.environ["NCCL_IB_DISABLE"] = (
    "1"  # also on a machine with InfiniBand, auto takes no NCCL between nodes unless a test has it so
)
# ranks share the cores, and starting threads costs each process 80 ms
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPISTRAT_DEVICE"] = "cpu"  # what wants a GPU says so, also on a machine that has one

# The speed of a machine fails no example; limits are for what hangs.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
