"""What NVIDIA's sanitizer says is believed only if it finds the error that is planted; one that is made up takes its place."""

from __future__ import annotations

import os

import pytest

from tests.gpu import sanitizer

CLEAN, FOUND = "========= ERROR SUMMARY: 0 errors", "========= ERROR SUMMARY: 3 errors"


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Give a function that has the sanitizer say one thing of the kernels and another one of the planted error."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def say(of_kernels, of_planted):
        program = tmp_path / "compute-sanitizer"
        text = f'case "$*" in *planted*) echo "{of_planted}"; exit 1;; *) echo "{of_kernels}";; esac'
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        return sanitizer.main()

    return say


def test_errors_are_counted_for_each_tool(says):
    tools = ("memcheck_errors", "initcheck_errors", "racecheck_errors")
    assert says(CLEAN, FOUND) == {**dict.fromkeys(tools, 0), "planted_errors": 3}
    assert says(FOUND, FOUND)["memcheck_errors"] == 3
    assert sanitizer.errors_in("========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)") == 2
    assert sanitizer.errors_in("========= ERROR SUMMARY: 1 error") == 1


def test_a_sanitizer_that_overlooks_the_planted_error_proves_nothing(says):
    with pytest.raises(AssertionError, match="overlooks a write beyond the end"):
        says(CLEAN, CLEAN)
    with pytest.raises(AssertionError, match="says nothing of errors"):
        says("Device not supported", FOUND)
