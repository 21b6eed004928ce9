"""Who competes: ours, and what a user would take instead."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.benchmarks.contest import Contender
from tests.benchmarks.session import Session

OURS, WRAPPED = "mpistrat", "mpi4py, wrapped"
# Who competes where nothing else is said.
NAMES = (OURS, "Open MPI", "Open MPI, no HAN", "MPICH", "gloo", "TensorFlow")
_PROGRAMS = Path(__file__).parent / "peers"
_ROOT = Path(__file__).parents[2]


def contenders(session: Session, names: tuple[str, ...] = NAMES, env: dict[str, str] | None = None) -> list[Contender]:
    """Return those of the names that are installed, or could be; the others are noted in the session as missing."""
    found = [_contender(session, name, env or {}) for name in names]
    return [contender for contender in found if contender is not None]


def _contender(session: Session, name: str, env: dict[str, str]) -> Contender | None:
    launcher, environment, program, variables = KINDS[name]
    python = session.environments.python(environment) if environment else sys.executable
    if not python:
        return None
    own = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **variables, **(env if launcher == "openmpi" else {})}
    return Contender(name, launcher, [python, str(_PROGRAMS / program)], own)


# In the order of tables: who starts the ranks, the environment that they need, their program, and further variables of theirs.
KINDS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    OURS: ("openmpi", "", "ours.py", {"PYTHONPATH": str(_ROOT)}),
    WRAPPED: ("openmpi", "", "wrapped_ranks.py", {"PYTHONPATH": str(_ROOT)}),
    "Open MPI": ("openmpi", "", "mpi_ranks.py", {}),
    "Open MPI, no HAN": ("openmpi", "", "mpi_ranks.py", {"OMPI_MCA_coll": "^han"}),
    "MPICH": ("mpich", "mpich", "mpi_ranks.py", {}),
    "gloo": ("plain", "torch", "gloo_ranks.py", {}),
    "TensorFlow": ("plain", "tensorflow", "tf_ranks.py", {}),
}
