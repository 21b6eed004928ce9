"""Parameter servers: pulls, pushes and scheduled functions, compared with TensorFlow and with synchronous training."""

from __future__ import annotations

import json
import sys

from mpistrat.launch.mpiexec import command
from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contenders import OURS, competing
from tests.benchmarks.pages import Table
from tests.benchmarks.session import PEERS, Session, answers
from tests.hosts.lab import Lab

KIB, MIB = 1 << 10, 1 << 20
# bytes of an array, and how often each worker sends or receives it
CASES = ((KIB, 3000), (64 * KIB, 1500), (MIB, 200), (4 * MIB, 60))
QUICK = ((KIB, 100), (64 * KIB, 50))
WORKERS = 2  # beside one chief and one ps
MOST_WORKERS = (1, 2, 4)


def run(session: Session) -> dict[str, Table]:
    """Measure ours and TensorFlow's in turn, with one ps: everything with two workers, only functions with more and fewer."""
    cases = QUICK if session.quick else CASES
    found: dict[tuple[str, int], dict[str, float]] = {}
    functions = [["", "workers", "schedule to done of an empty function", "functions per second"]]
    for workers in (WORKERS,) if session.quick else MOST_WORKERS:
        arguments = [str(workers), json.dumps(cases if workers == WORKERS else [])]
        for name, (program, environ) in _programs(session, workers, arguments).items():
            [one] = answers(program, environ)
            found[name, workers] = one
            session.add(functions, [name, str(workers), format_seconds(one["seconds"]), f"{one['functions']:.0f}"])
    ours, theirs = found[OURS, WORKERS], found.get(("TensorFlow", WORKERS))
    lines = [_line(name, ours, theirs) for name in ours if name.partition(" ")[0] in ("pull", "push")]
    steps = []
    with Lab(1, "unlimited") as lab, competing(session, lab, WORKERS) as contest:
        for nbytes, times in cases:
            rates = contest.call(OURS, "steps_per_second", nbytes=nbytes, times=times)
            served, synchronous = ours[f"step {nbytes}"], sum(rates)
            steps.append([format_bytes(nbytes), f"{served:.0f}", f"{synchronous:.0f}", f"{synchronous / served:.1f}"])
    return {
        "": [["per second, two workers together", "mpistrat", "TensorFlow", "times as many"], *lines],
        "functions": functions,
        "steps": [["steps per second, model of", "parameter servers", "synchronous", "times as many"], *steps],
    }


def _programs(session: Session, workers: int, arguments: list[str]) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return what starts ours and TensorFlow's, where that is installed, each with further environment."""
    found = {OURS: command(workers + 2, [sys.executable, str(PEERS / "parameter_server_ranks.py"), *arguments])}
    if python := session.environments.python("tensorflow"):
        session.versions["TensorFlow"] = "2.21.0"
        # its processes find their GPUs, and say a lot, by themselves
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        found["TensorFlow"] = ([python, str(PEERS / "tf_parameter_server.py"), *arguments], quiet)
    return found


def _line(name: str, ours: dict[str, float], theirs: dict[str, float] | None) -> list[str]:
    if theirs is None:
        return [_said(name), f"{ours[name]:.0f}", "", ""]
    return [_said(name), f"{ours[name]:.0f}", f"{theirs[name]:.0f}", f"{ours[name] / theirs[name]:.1f}"]


def _said(name: str) -> str:
    verb, _, size = name.partition(" ")
    return f"{verb} of {format_bytes(int(size)) if size.isdigit() else '64 random rows of 1 000 000 × 32'}"
