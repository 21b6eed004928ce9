"""What was run on a GPU, and whether that still holds: a reminder, for whoever has no GPU cannot mend it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs.gpu_page import newest, rows, state
from tests.gpu.probes import PROBES

_GPU, _NONE = {"gpus": ["NVIDIA H200"]}, {"gpus": []}


def _evidence(**changes):
    cases = [{"name": probe.name, "outcome": "ok", "reason": "", "figures": {"checks": 1}} for probe in PROBES]
    sources = {"device/cuda.py": "as it was"}
    return {"date": "2026-11-20", "commit": "abc", "machine": _GPU, "sources": sources, "cases": cases, **changes}


def test_the_evidence_that_is_kept_is_current():
    known = state(newest())
    if known:
        pytest.skip(known)


def test_the_newest_evidence_of_a_gpu_counts(tmp_path):
    assert newest(tmp_path) is None
    for index, changes in enumerate(({"date": "2026-10-01"}, {"date": "2027-01-02"}, {"date": "2027-02-03", "machine": _NONE})):
        (tmp_path / f"{index}.json").write_text(json.dumps(_evidence(**changes)))
    assert newest(tmp_path)["date"] == "2027-01-02"


def test_evidence_says_how_it_is_stale(tmp_path: Path):
    assert state(None).startswith("never run on a device: ")
    evidence = _evidence(sources={"device/cuda.py": "another"})
    evidence["cases"][0]["outcome"] = "skipped"
    text = "evidence of 2026-11-20 (commit abc) is stale; changed since: device/cuda.py; not run there: timing pack"
    assert state(evidence, tmp_path) == text
    (tmp_path / "device").mkdir()
    assert state(_evidence(sources={}), tmp_path) == ""


def test_the_table_has_a_row_for_each_probe():
    evidence = _evidence()
    evidence["cases"][0] |= {"outcome": "failed", "reason": "it was killed after 60 s\nand more"}
    evidence["cases"][1] |= {"outcome": "skipped", "reason": "no GPU"}
    found = [row[-1] for row in rows(evidence)]
    assert found == ["failed: it was killed after 60 s", "not run: no GPU", *["ok: checks 1"] * (len(PROBES) - 2)]
    assert {row[-1] for row in rows(None)} == {"never run on a device"}
    assert next(iter(rows(None)))[2] == "`fraction >= 0.85`"
