"""Who competes: ours, and what a user would take instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.contest import Contender, Contest
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

OURS, WRAPPED = "mpistrat", "mpi4py, wrapped"
# Who competes where nothing else is said.
NAMES = (OURS, "Open MPI", "Open MPI, no HAN", "MPICH", "gloo", "TensorFlow")
_PROGRAMS = Path(__file__).parent / "peers"
_ROOT = Path(__file__).parents[2]


@contextmanager
def competing(
    session: Session, lab: Lab, ranks: int, placement: str = "block", names: tuple[str, ...] = (OURS,), **env: str
) -> Iterator[Contest]:
    """Give the programs of those names, in a lab; the session learns their versions, and who could not compete."""
    with Contest(lab, ranks, placement, _contenders(session, names, env)) as contest:
        session.versions.update(contest.versions)
        yield contest
        left_out = {f"{name} on {len(lab.hosts)} hosts {placement}": why for name, why in contest.missing.items()}
        session.environments.missing.update(left_out)


def _contenders(session: Session, names: tuple[str, ...], env: dict[str, str]) -> Iterator[Contender]:
    """Return those that are installed, or could be."""
    for name in names:
        launcher, environment, program, variables = KINDS[name]
        python = session.environments.python(environment) if environment else sys.executable
        if python:
            own = variables | (env if launcher == "openmpi" else {})
            yield Contender(name, launcher, [python, str(_PROGRAMS / program)], own)


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
