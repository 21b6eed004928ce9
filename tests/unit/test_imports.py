"""What is imported only when it is needed, as MPI and CuPy are, and what is imported as programs for TensorFlow do."""

import importlib

import pytest

import mpistrat
from mpistrat.experimental.partitioners import FixedShardsPartitioner
from mpistrat.parameter_server.coordinator import ClusterCoordinator
from tests.processes import python

LAUNCH = "import mpistrat.topology.world; from mpistrat.launch import abort, bootstrap, environment, mpiexec, openmpi"
ONE_DEVICE = (
    "import mpistrat, numpy; strategy = mpistrat.OneDeviceStrategy(); "
    "strategy.run(lambda: mpistrat.get_replica_context().all_reduce('sum', numpy.ones(3)))"
)
ARRAYS = "from mpistrat.arrays import as_array, as_operand, like; like(as_array(memoryview(b'ab')), 1.0)"
INFO = "from mpistrat.tools.cli import main; main(['info', '--json'])"
GROUPS = "import mpistrat.parameter_server.strategy, mpistrat.lazy; assert not hasattr(mpistrat.lazy.MPI, '__wrapped__')"
PLAN = "from mpistrat.tools.cli import main; main(['plan', '--world', '4x8', '--bytes', '64MiB'])"


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        ("import mpistrat.tools.run", ["mpi4py", "numpy"]),
        ("; ".join((LAUNCH, PLAN, ARRAYS, ONE_DEVICE)), ["mpi4py", "cupy", "torch", "jax"]),
        (INFO, ["mpi4py.MPI"]),
        (GROUPS, ["mpi4py.MPI"]),
    ],
)
def test_what_is_not_needed_is_not_imported(program, unneeded):
    done = python(f"import sys; {program}; sys.exit(' '.join({{*{unneeded}}} & {{*sys.modules}}))")
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(("module", "known"), [("coordinator", ClusterCoordinator), ("partitioners", FixedShardsPartitioner)])
def test_what_tensorflow_has_as_a_module_is_one(module, known):
    imported = importlib.import_module(f"mpistrat.experimental.{module}")
    assert imported is getattr(mpistrat.experimental, module)
    assert getattr(imported, known.__name__) is known
