"""A CUDA-aware MPI from packages: the UCX of libucx-cu13 in the place of the one in Open MPI's wheel, on CPUs."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from mpistrat.launch.mpiexec import command
from mpistrat.launch.openmpi import has_wheel
from tests.processes import run_bounded

FOUND = importlib.util.find_spec("libucx")

pytestmark = [
    pytest.mark.skipif(FOUND is None, reason="no libucx: pip install libucx-cu13"),
    pytest.mark.skipif(not has_wheel(os.environ), reason="the MPI library is not Open MPI's wheel"),
]


FILES = [f"tests/ranks/test_{name}.py" for name in ("transports", "verbs", "all_reduce")]
TESTS = "(pass_the_kit and (ring or rail)) or every_verb_gives or large_buffers"


def test_rings_and_verbs_are_right_over_the_ucx_of_cuda():
    assert FOUND is not None
    libraries = Path(*FOUND.submodule_search_locations or ()) / "lib"
    argv, extra = command(4, [sys.executable, "-m", "pytest", "--with-mpi", "-q", *FILES, "-k", TESTS], "2x2")
    environ = {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "UCX_MODULE_DIR": str(libraries / "ucx"),
        "UCX_TLS": "sm,tcp,self",
        "UCX_LOG_LEVEL": "info",
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_opal_common_ucx_tls": "any",
        "OMPI_MCA_opal_common_ucx_devices": "any",
    }
    done = run_bounded(argv, 120.0, environ | extra)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout
    assert f"loaded from {libraries}/libucp.so" in done.stdout + done.stderr
