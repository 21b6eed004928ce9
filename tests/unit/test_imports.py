"""What is imported only when it is needed, as MPI and CuPy are, and what is imported as programs for TensorFlow do."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import mpistrat
from mpistrat.experimental.partitioners import FixedShardsPartitioner
from mpistrat.parameter_server.coordinator import ClusterCoordinator

ONE_DEVICE = (
    "import mpistrat, numpy; strategy = mpistrat.OneDeviceStrategy(); "
    "strategy.run(lambda: mpistrat.get_replica_context().all_reduce('sum', numpy.ones(3)))"
)
ARRAYS = "from mpistrat.arrays import as_array, as_operand, like; like(as_array(memoryview(b'ab')), 1.0)"
INFO = "from mpistrat.tools.cli import main; main(['info', '--json'])"
PLAN = "from mpistrat.tools.cli import main; main(['plan', '--world', '4x8', '--bytes', '64MiB'])"


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        *(
            (f"import mpistrat.launch.{module}", ["mpi4py"])
            for module in ("environment", "bootstrap", "mpiexec", "openmpi", "abort")
        ),
        ("import mpistrat.topology.world", ["mpi4py", "cupy"]),
        ("import mpistrat.tools.run", ["mpi4py", "numpy"]),
        (ONE_DEVICE, ["mpi4py", "cupy"]),
        (ARRAYS, ["torch", "jax", "cupy"]),
        (INFO, ["mpi4py.MPI"]),
        (PLAN, ["mpi4py", "cupy"]),
    ],
)
def test_what_is_not_needed_is_not_imported(program: str, unneeded: list[str]) -> None:
    program = f"import sys; {program}; sys.exit(' '.join({{*{unneeded}}} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(("module", "known"), [("coordinator", ClusterCoordinator), ("partitioners", FixedShardsPartitioner)])
def test_what_tensorflow_has_as_a_module_is_one(module, known):
    imported = importlib.import_module(f"mpistrat.experimental.{module}")
    assert imported is getattr(mpistrat.experimental, module)
    assert getattr(imported, known.__name__) is known
