"""Parameter servers: pulls, pushes and scheduled functions, compared with TensorFlow and with synchronous training."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mpistrat.launch.mpiexec import command
from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session, answers_of
from tests.processes import run_bounded

KIB, MIB = 1 << 10, 1 << 20
# bytes of an array, and how often each worker sends or receives it
CASES = ((KIB, 3000), (64 * KIB, 1500), (MIB, 200), (4 * MIB, 60))
QUICK = ((KIB, 100), (64 * KIB, 50))
WORKERS = 2  # beside one chief and one ps
MOST_WORKERS = (1, 2, 4)
_LIMIT_SECONDS = 600.0
_PEERS = Path(__file__).parent / "peers"


def run(session: Session) -> dict[str, Any]:
    """Measure ours and TensorFlow's in turn, with one ps: everything with two workers, only functions with more and fewer."""
    cases = QUICK if session.quick else CASES
    tensorflow = session.environments.python("tensorflow")
    rows = []
    for workers in (WORKERS,) if session.quick else MOST_WORKERS:
        arguments = [str(workers), json.dumps(cases if workers == WORKERS else [])]
        argv, extra = command(workers + 2, [sys.executable, str(_PEERS / "parameter_server_ranks.py"), *arguments])
        programs = {"mpistrat": (argv, extra)}
        if tensorflow:
            # its processes find their GPUs, and say a lot, by themselves
            quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
            programs["TensorFlow"] = ([tensorflow, str(_PEERS / "tf_parameter_server.py"), *arguments], quiet)
        for name, (program, environ) in programs.items():
            done = run_bounded(program, _LIMIT_SECONDS, {**os.environ, **environ})
            if done.returncode:
                raise RuntimeError(f"{name} with {workers} workers failed: {done.stderr}")
            rows.append({"name": name, "workers": workers, **json.loads(done.stdout.splitlines()[-1])})
            session.say(f"{name} with {workers} workers: {format_seconds(rows[-1]['seconds'])} for an empty function")
    if tensorflow:
        session.versions["TensorFlow"] = "2.21.0"
    [synchronous] = answers_of(WORKERS, "synchronous_ranks.py", json.dumps(cases))
    [placed] = answers_of(4, "placement_ranks.py")
    session.say(f"synchronous, {WORKERS} ranks: " + ", ".join(f"{name} {rate:.0f}/s" for name, rate in synchronous.items()))
    return {"rows": rows, "synchronous": synchronous, "placed": placed}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return pulls and pushes, functions, steps, and the bytes of each server."""
    found = {(row["name"], row["workers"]): row for row in result["rows"]}
    ours, theirs = found["mpistrat", WORKERS], found.get(("TensorFlow", WORKERS))
    lines = [_line(name, ours, theirs) for name in ours if name.partition(" ")[0] in ("pull", "push")]
    functions = [
        [row["name"], str(row["workers"]), format_seconds(row["seconds"]), f"{row['functions']:.0f}"] for row in result["rows"]
    ]
    steps = [
        [format_bytes(int(name.partition(" ")[2])), f"{ours[name]:.0f}", f"{rate:.0f}", f"{rate / ours[name]:.1f}"]
        for name, rate in result["synchronous"].items()
    ]
    placed = [[name, *map(format_bytes, numbers), f"{_unevenness(numbers):.1%}"] for name, numbers in result["placed"].items()]
    return {
        "": [["per second, two workers together", "mpistrat", "TensorFlow", "times as many"], *lines],
        "functions": [["", "workers", "schedule to done of an empty function", "functions per second"], *functions],
        "steps": [["steps per second, model of", "parameter servers", "synchronous", "times as many"], *steps],
        "placement": [["placement", "bytes of server 0", "of server 1", "above even"], *placed],
    }


def _unevenness(found: list[int]) -> float:
    """Return how far the server with the most bytes is from the mean of all."""
    return max(found) * len(found) / sum(found) - 1


def _line(name: str, ours: dict[str, Any], theirs: dict[str, Any] | None) -> list[str]:
    if theirs is None:
        return [_said(name), f"{ours[name]:.0f}", "", ""]
    return [_said(name), f"{ours[name]:.0f}", f"{theirs[name]:.0f}", f"{ours[name] / theirs[name]:.1f}"]


def _said(name: str) -> str:
    verb, _, size = name.partition(" ")
    return f"{verb} of {format_bytes(int(size)) if size.isdigit() else '64 random rows of 1 000 000 × 32'}"
