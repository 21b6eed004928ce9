"""The page of what was run on a GPU: its table follows from the probes, and from the newest evidence that is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT
from tests.gpu.evidence import changed_since
from tests.gpu.probes import PROBES, Probe

__all__ = ["FOLDER", "newest", "rows", "state"]

FOLDER = ROOT / "docs" / "benchmarks" / "gpu"
NEVER = "never run on a device"


def newest(folder: Path = FOLDER) -> Mapping[str, Any] | None:
    """Return the newest evidence in a folder, of those that were collected on a GPU; None where there is none."""
    kept = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    kept = [evidence for evidence in kept if evidence["machine"]["gpus"]]
    return max(kept, key=lambda evidence: evidence["date"]) if kept else None


def state(evidence: Mapping[str, Any] | None, package: Path | None = None) -> str:
    """Return what the newest evidence is worth: nothing, if there is none; less, the more has changed since."""
    if evidence is None:
        return f"{NEVER}: python -m tests.gpu.evidence --out FILE, on a machine with a GPU"
    changed = changed_since(evidence, package) if package else changed_since(evidence)
    known = {case["name"] for case in evidence["cases"] if case["outcome"] != "skipped"}
    unknown = [probe.name for probe in PROBES if probe.name not in known]
    parts = [f"changed since: {', '.join(changed)}"] if changed else []
    parts += [f"not run there: {', '.join(unknown)}"] if unknown else []
    return f"evidence of {evidence['date']} (commit {evidence['commit']}) is stale; {'; '.join(parts)}" if parts else ""


def rows(evidence: Mapping[str, Any] | None) -> Iterator[tuple[str, str, str, str]]:
    """Return for each probe its name, what is known once it has run, its goal, and what came of it."""
    cases = {case["name"]: case for case in evidence["cases"]} if evidence else {}
    for probe in PROBES:
        goals = ", ".join(f"`{goal}`" for goal in probe.goals) or "–"
        yield f"`{probe.name}`", probe.shows, goals, _found(probe, cases.get(probe.name))


def _found(probe: Probe, case: Mapping[str, Any] | None) -> str:
    if case is None or case["outcome"] == "skipped":
        return f"not run: {case['reason']}" if case else NEVER
    if case["outcome"] == "failed":
        return f"failed: {case['reason'].splitlines()[0]}"
    return "ok: " + ", ".join(f"{name} {value}" for name, value in case["figures"].items())
