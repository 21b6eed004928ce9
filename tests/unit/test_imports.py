"""What is imported only when it is needed: MPI, CuPy, and the libraries whose arrays are taken."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
        ("import mpistrat.topology.devices", ["mpi4py", "cupy"]),
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
