"""Run everything that needs a GPU on a machine that has one, and write what came of it as JSON.

    python -m tests.gpu.evidence --out FILE                     # --only TEXT…: a part of it
    python -m tests.gpu.evidence --out FILE --merge PART PART   # joins what several runs wrote

Each probe has a session of its own and a deadline, later on a busy machine; the file is written anew after each, so that what
is known survives a probe that takes the machine down. Without a GPU every probe that needs one says why it was left out.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpistrat.launch.mpiexec import command
from tests.gpu.machine import Machine, look
from tests.gpu.parts import FAILED, OK, SKIPPED, merged
from tests.gpu.probes import PROBES, Probe
from tests.processes import TIMED_OUT, patient, run_bounded

__all__ = ["OK", "collect", "run_probe"]

BUDGET_SECONDS = 500.0
SHOWN_LINES = 12

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "mpistrat"
_SHAPING = ("CUDA_", "FI_", "I_MPI_", "MPICH_", "MPIR_", "MPISTRAT_", "NCCL_", "OMPI_MCA_", "UCX_")
_SOURCES = ("device/*.*", "packing/*.py", "transports/*.py", "execution/*.py", "communicator/*.py")
"""All files on the way of an array."""


def main(argv: Sequence[str] | None = None) -> int:
    """Collect the evidence; return 1 if a probe failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="only probes with such a text in their names")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="PART", help="run nothing; join what was written before")
    arguments = parser.parse_args(argv)
    if arguments.merge:
        _write(arguments.out, merged([json.loads(part.read_text()) for part in arguments.merge], [p.name for p in PROBES]))
        return 0
    probes = [probe for probe in PROBES if any(text in probe.name for text in arguments.only)]
    for text in arguments.only:
        if not any(text in probe.name for probe in PROBES):
            parser.error(f"no probe has {text!r} in its name; {', '.join(probe.name for probe in PROBES)}")
    evidence = collect(look(), probes, lambda found: _write(arguments.out, found))
    return int(any(case["outcome"] == FAILED for case in evidence["cases"]))


def collect(machine: Machine, probes: Sequence[Probe], write: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Run probes one after the other.

    Parameters
    ----------
    machine : Machine
        What it has.
    probes : sequence of Probe
        What to run.
    write : callable
        Called with all that is known, at the beginning and after each probe.

    Returns
    -------
    dict
        What was written last: the circumstances, and ``cases``, one for each probe.
    """
    begun = time.monotonic()
    evidence: dict[str, Any] = {
        "date": _now()[:10],
        "commit": _commit(),
        "machine": asdict(machine),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SHAPING)},
        "sources": _digests(_PACKAGE),
        "seconds": 0,
        "is_complete": False,
        "cases": [],
    }
    write(evidence)
    for probe in probes:
        left = BUDGET_SECONDS - (time.monotonic() - begun)
        case = run_probe(probe, machine, left)
        evidence["cases"].append(case)
        evidence["seconds"] = round(time.monotonic() - begun)
        evidence["is_complete"] = len(evidence["cases"]) == len(probes)
        write(evidence)
        print(_line(case), flush=True)
    return evidence


def run_probe(probe: Probe, machine: Machine, seconds_left: float = BUDGET_SECONDS) -> dict[str, Any]:
    """Run one probe in a session of its own.

    Returns
    -------
    dict
        ``name``, ``at`` (when it ended), ``outcome`` (OK, FAILED or SKIPPED), ``reason`` for any but OK, ``seconds``,
        ``figures``, for each goal of the probe whether it was reached, and ``stderr``, the end of it.
    """
    refusal = probe.refusal(machine)
    if not refusal and seconds_left < probe.seconds:
        refusal = f"no time was left: it may take {probe.seconds:g} s"
    if refusal:
        return _case(probe, SKIPPED, refusal)
    limit = min(patient(probe.seconds), seconds_left)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        argv = [sys.executable, "-m", *probe.command, "--report", str(report)]
        argv, extra = command(probe.num_ranks, argv) if probe.num_ranks else (argv, {})
        done = run_bounded(argv, limit, {**os.environ, **extra, **probe.environ}, _ROOT)
        figures = json.loads(report.read_text()) if report.exists() and not done.returncode else {}  # else it may be cut off
    seconds = round(time.monotonic() - begun, 1)
    if done.returncode == TIMED_OUT:
        return _case(probe, FAILED, f"it was killed after {limit:g} s\n{_tail(done)}", seconds)
    if done.returncode or not figures:
        return _case(probe, FAILED, f"it ended with {done.returncode}\n{_tail(done)}", seconds)
    if "skipped" in figures:
        return _case(probe, SKIPPED, figures["skipped"], seconds)
    return _case(probe, OK, "", seconds, figures, _end_of(done.stderr))


def _case(
    probe: Probe,
    outcome: str,
    reason: str,
    seconds: float = 0.0,
    figures: Mapping[str, float] | None = None,
    stderr: str = "",
) -> dict[str, Any]:
    goals = {str(goal): goal.is_reached(figures) for goal in probe.goals} if figures else {}
    return {
        "name": probe.name,
        "at": _now(),
        "outcome": outcome,
        "reason": reason,
        "seconds": seconds,
        "figures": dict(figures or {}),
        "goals": goals,
        "stderr": stderr,
    }


def _digests(package: Path) -> dict[str, str]:
    paths = sorted({path for pattern in _SOURCES for path in package.glob(pattern) if path.suffix in (".py", ".cu")})
    return {path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


def _commit() -> str:
    """Return the commit of this checkout, and whether the package differs from it; empty outside one."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=_PACKAGE, capture_output=True, text=True, check=False).stdout.strip()

    try:
        return f"{git('rev-parse', '--short', 'HEAD')}{' with changes' if git('status', '--porcelain', '--', '.') else ''}"
    except FileNotFoundError:
        return ""


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    return _end_of(done.stdout + done.stderr)


def _end_of(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])


def _line(case: Mapping[str, Any]) -> str:
    figures = ", ".join(f"{name} {value}" for name, value in case["figures"].items())
    missed = "".join(f"; goal {goal} missed" for goal, reached in case["goals"].items() if not reached)
    return f"{case['outcome']:8}{case['name']}: {case['reason'] or figures}{missed}"


def _write(path: Path, evidence: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evidence, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
