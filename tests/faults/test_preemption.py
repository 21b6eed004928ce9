"""A slice of ``python -m tests.faults.preempt``: jobs that are told to end save, leave, and continue as if nobody had."""

from __future__ import annotations

import pytest

from tests.faults.preempt import Counts, preempt

pytest.importorskip("safetensors")


def test_preempted_jobs_end_with_the_weights_of_an_undisturbed_one() -> None:
    counts = Counts()
    wrong = list(preempt("2x2", 3, seed=1, counts=counts))
    assert not wrong, "\n".join(wrong)
    assert counts.preempted
