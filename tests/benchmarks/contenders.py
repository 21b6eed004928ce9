"""Who competes: ours, and what a user would take instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.contest import Contender, Contest
from tests.benchmarks.session import PEERS, Session
from tests.hosts.lab import Lab

OURS, WRAPPED = "mpistrat", "mpi4py, wrapped"
# Who competes where nothing else is said.
NAMES = (OURS, "Open MPI", "Open MPI, no HAN", "MPICH", "gloo", "TensorFlow")
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


def all_reduces(nbytes: int, kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return what `Contest.alternate` is told of our all-reduces of so many bytes, with options of several kinds."""
    return {name: (OURS, {"kind": "all_reduce", "nbytes": nbytes, "options": fields}) for name, fields in kinds.items()}


def _contenders(session: Session, names: tuple[str, ...], env: dict[str, str]) -> Iterator[Contender]:
    """Return those that are installed, or could be."""
    for name in names:
        launcher, environment, program, variables = KINDS[name]
        python = session.environments.python(environment) if environment else sys.executable
        if python:
            own = variables | (env if launcher == "openmpi" else {})
            yield Contender(name, launcher, [python, str(PEERS / program)], own)


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
