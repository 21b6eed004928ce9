"""Overhead: what a call costs on top of bare MPI, for one array of 8 bytes and for a nest of 161, and where the time goes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tests.benchmarks.cases import verdict
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

__all__ = ["draw", "run", "table"]

# leaves of the nest, and the most that a call may cost on top, in microseconds
GOALS = {1: 10.0, 10: None, 161: 60.0}
RANKS, PROFILED = 2, 161


def run(session: Session) -> dict[str, Any]:
    """Measure nests of several sizes on one host, several times over."""
    env = {"OMPI_MCA_mpi_yield_when_idle": "0"}
    times, rows = (2, []) if session.quick else (7, [])
    with Lab(1, "unlimited") as lab, Contest(lab, RANKS, "block", contenders(session, (OURS,), env)) as contest:
        for leaves in GOALS:
            runs = [contest.call(OURS, "overhead", leaves=leaves, calls=20)[0] for _ in range(times)]
            rows.append({"leaves": leaves, "runs": runs})
            session.say(f"{leaves} arrays: {_added(rows[-1]):.1f} µs")
        profile = contest.call(OURS, "profile", leaves=PROFILED, calls=200 if session.quick else 2000)[0]
    return {"rows": rows, "profile": profile}


def table(result: dict[str, Any]) -> str:
    """Return the verdict on goal 7, the table, and the profile of the largest nest."""
    rows = [{**row, "goal": GOALS[row["leaves"]]} for row in result["rows"]]
    judged = [row for row in rows if row["goal"]]
    misses = [f"{row['leaves']} arrays {_added(row):.1f} µs" for row in judged if _added(row) > row["goal"]]
    lines = [
        [
            f"{row['leaves']} of 8 bytes",
            *(f"{statistics.median(run[name] for run in row['runs']) * 1e6:.1f} µs" for name in ("bare", "ours")),
            f"{_added(row):.1f} µs ({min(_differences(row)):.1f} to {max(_differences(row)):.1f})",
            f"{row['goal']:.0f} µs" if row["goal"] else "–",
        ]
        for row in rows
    ]
    heads = ["arrays", "bare MPI_Allreduce of the bytes", "context.all_reduce", "on top (least and most of the runs)", "goal"]
    goal = "at most 10 µs on top of bare MPI for one array, 60 µs for a nest of 161"
    profile = markdown_table(
        ["function", "own time per call"], [[f"`{name}`", f"{us:.1f} µs"] for name, us in result["profile"]]
    )
    return (
        f"{verdict(goal, len(judged) - len(misses), misses)}\n{markdown_table(heads, lines)}\n"
        f"Where the time of the {PROFILED} arrays goes, by `cProfile`, which itself slows every Python call:\n\n{profile}"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw what comes on top, run by run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for index, row in enumerate(result["rows"]):
        axes.plot([index] * len(row["runs"]), _differences(row), "o", color="black", alpha=0.5)
        if GOALS[row["leaves"]]:
            axes.hlines(GOALS[row["leaves"]], index - 0.3, index + 0.3, color="tab:red", label="goal" if index == 0 else None)
    axes.set_xticks(range(len(result["rows"])), [f"{row['leaves']} arrays" for row in result["rows"]])
    axes.set_ylabel("µs on top of bare MPI")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _differences(row: dict[str, Any]) -> list[float]:
    return [(run["ours"] - run["bare"]) * 1e6 for run in row["runs"]]


def _added(row: dict[str, Any]) -> float:
    return statistics.median(_differences(row))
