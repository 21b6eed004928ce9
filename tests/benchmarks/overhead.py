"""Overhead: what a call costs on top of bare MPI, for nests of 1 to 161 arrays and in every form, and where the time goes."""

from __future__ import annotations

import statistics
from typing import Any

from mpistrat.text import format_bytes
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import Table, spread
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

LEAVES = (1, 10, 161)  # of the nest
FORM_SIZES = (8, 1 << 10, 1 << 16, 1 << 20)
RANKS, PROFILED = 2, 161


def run(session: Session) -> dict[str, Any]:
    """Measure nests of several sizes on one host, several times over."""
    env = {"OMPI_MCA_mpi_yield_when_idle": "0"}
    times, rows = (2, []) if session.quick else (7, [])
    with Lab(1, "unlimited") as lab, Contest(lab, RANKS, "block", contenders(session, (OURS,), env)) as contest:
        for leaves in LEAVES:
            runs = [contest.call(OURS, "overhead", leaves=leaves, calls=20)[0] for _ in range(times)]
            rows.append({"leaves": leaves, "runs": runs})
            session.say(f"{leaves} arrays: {_added(rows[-1]):.1f} µs")
        forms: dict[int, list[dict[str, float]]] = {}
        for nbytes in FORM_SIZES:
            forms[nbytes] = [contest.call(OURS, "forms", nbytes=nbytes, calls=20)[0] for _ in range(min(times, 5))]
            session.say(f"every form of a call with {format_bytes(nbytes)}")
        profile = contest.call(OURS, "profile", leaves=PROFILED, calls=200 if session.quick else 2000)[0]
    return {"rows": rows, "forms": forms, "profile": profile}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the overhead of each nest, the times of each form of a call, and the profile of the largest nest."""
    lines = [
        [
            f"{row['leaves']} of 8 bytes",
            *(f"{statistics.median(run[name] for run in row['runs']) * 1e6:.1f} µs" for name in ("bare", "ours")),
            f"{_added(row):.1f} µs ({min(_differences(row)):.1f} to {max(_differences(row)):.1f})",
        ]
        for row in result["rows"]
    ]
    heads = ["arrays", "bare MPI_Allreduce of the bytes", "context.all_reduce", "on top (least to most of the runs)"]
    profile = [[f"`{name}`", f"{us:.1f} µs"] for name, us in result["profile"]]
    forms, sizes = result["forms"], [format_bytes(nbytes) for nbytes in result["forms"]]
    by_form = [[form, *(_spread([run[form] for run in runs]) for runs in forms.values())] for form in forms[FORM_SIZES[0]][0]]
    return {
        "": [heads, *lines],
        "forms": [["call", *sizes], *by_form],
        "profile": [["function", "own time per call"], *profile],
    }


def _spread(times: list[float]) -> str:
    return spread({"seconds": statistics.median(times), "best_seconds": min(times), "worst_seconds": max(times)})


def _differences(row: dict[str, Any]) -> list[float]:
    return [(run["ours"] - run["bare"]) * 1e6 for run in row["runs"]]


def _added(row: dict[str, Any]) -> float:
    return statistics.median(_differences(row))
