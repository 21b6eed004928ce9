"""What is to be seen where a rank fails before the first collective on a GPU, seen on CPUs."""

from __future__ import annotations

import os

import pytest

from tests.gpu import first_fault


@pytest.mark.parametrize("fault", first_fault.FAULTS)
def test_the_job_ends_and_names_the_rank(fault, monkeypatch):
    environ = {**os.environ, "MPISTRAT_DEVICE": "cpu"}
    assert first_fault.end(fault, environ) < 5
    monkeypatch.setattr(first_fault, "FAULTY", 7)  # whom nobody names
    with pytest.raises(AssertionError, match="nobody named rank 7"):
        first_fault.end(fault, environ)
