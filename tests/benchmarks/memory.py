"""Memory: what is held to communicate, over the largest pack, and what further calls allocate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes
from tests.benchmarks.cases import verdict
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.gradients import resnet50
from tests.hosts.lab import Lab

__all__ = ["draw", "run", "table"]

MIB = 1 << 20
GOAL = 2.0
# auto may leave a buffer to MPI, whose memory is not counted
ALGORITHMS = ("auto", "hierarchical")
# hosts, ranks, placement
PLACES = ((1, 2, "block"), (1, 4, "block"), (2, 4, "block"), (2, 4, "3+1"), (4, 4, "block"))
VALUES = {
    "one array of 16 MiB": lambda: [4 * MIB],
    "one array of 64 MiB": lambda: [16 * MIB],
    "ResNet-50's 161 gradients": lambda: [math.prod(shape) for shape in resnet50()],
}


def run(session: Session) -> dict[str, Any]:
    """Look at every place with every value, each in programs of their own."""
    rows = []
    values = dict(list(VALUES.items())[:1]) if session.quick else VALUES
    for hosts, ranks, placement in PLACES[1:3] if session.quick else PLACES:
        with Lab(hosts, "unlimited") as lab:
            for value, make in values.items():
                for algorithm in ALGORITHMS:
                    with Contest(lab, ranks, placement, contenders(session, (OURS,))) as contest:
                        reports = contest.call(OURS, "memory", counts=make(), options={"algorithm": algorithm})
                    most = max(reports, key=lambda report: report["total_bytes"])
                    asked = {"hosts": hosts, "ranks": ranks, "placement": placement, "value": value, "algorithm": algorithm}
                    rows.append(asked | most)
                    session.say(f"{_where(rows[-1])}, {value}: {_ratio(rows[-1]):.2f}")
    return {"rows": rows}


def table(result: dict[str, Any]) -> str:
    """Return the verdict on goal 8, and the table of the rank that holds the most."""
    rows = result["rows"]
    misses = [f"{_where(row)}, {row['value']} {_ratio(row):.2f}" for row in rows if _ratio(row) > GOAL]
    lines = [
        [
            _where(row),
            row["value"],
            *(format_bytes(row[f"{name}_bytes"]) for name in ("window", "rail", "plan", "total", "largest_pack")),
            f"{_ratio(row):.2f}",
            format_bytes(max(row["grown_bytes"], 0)),
            format_bytes(row["peak_bytes"]),
        ]
        for row in rows
    ]
    heads = [
        "hosts, ranks, placement, algorithm",
        "value",
        "window",
        "rails",
        "plans",
        "in all",
        "largest pack",
        "in all / pack",
    ]
    heads += ["kept by ten more calls", "most at any time in them"]
    goal = f"what a rank holds is at most {GOAL:.0f} times the largest pack"
    return f"{verdict(goal, len(rows) - len(misses), misses)}\n{markdown_table(heads, lines)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw what is held, over the largest pack."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    figure, axes = plt.subplots(figsize=(8, 0.35 * len(rows) + 1.5), layout="constrained")
    left = [0.0] * len(rows)
    for name in ("window", "rail", "plan"):
        parts = [row[f"{name}_bytes"] / row["largest_pack_bytes"] for row in rows]
        axes.barh([f"{_where(row)}: {row['value']}" for row in rows], parts, left=left, label=name)
        left = [start + part for start, part in zip(left, parts, strict=True)]
    axes.axvline(GOAL, color="tab:red", label="goal: at most")
    axes.invert_yaxis()
    axes.set_xlabel("bytes held / largest pack")
    axes.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _where(row: dict[str, Any]) -> str:
    return f"{row['hosts']}, {row['ranks']}, {row['placement']}, {row['algorithm']}"


def _ratio(row: dict[str, Any]) -> float:
    return float(row["total_bytes"] / row["largest_pack_bytes"]) if row["largest_pack_bytes"] else 0.0
