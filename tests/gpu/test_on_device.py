"""Everything that is known only of a real GPU: the probes of `python -m tests.gpu.evidence`, each one test.

Each has a session of its own with a deadline. On one GPU several ranks share it, as virtual nodes.
"""

from __future__ import annotations

import pytest

from tests.gpu.evidence import FAILED, SKIPPED, run_probe
from tests.gpu.machine import Machine, look
from tests.gpu.probes import PROBES, Probe


@pytest.fixture(scope="module")
def machine() -> Machine:
    return look()


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_probe(machine: Machine, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPISTRAT_MPI_GPU")  # here MPI is asked
    case = run_probe(probe, machine)
    if case["outcome"] == SKIPPED:
        pytest.skip(case["reason"])
    assert case["outcome"] != FAILED, case["reason"]
    missed = [goal for goal, reached in case["goals"].items() if not reached]
    if missed:
        pytest.skip(f"it works; {', '.join(missed)} is a goal that was missed: {case['figures']}")
