"""Many arrays: the gradients of two networks in one call, against one flat buffer, one call for each, and peers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.cases import verdict
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.gradients import resnet50, transformer
from tests.hosts.lab import Lab

__all__ = ["draw", "run", "table"]

GOAL = 0.93
BATCH, FLAT = "mpistrat, one batch", "mpistrat, one flat buffer"
SMALL = {"width": 256, "vocabulary": 8000, "positions": 256}
NETWORKS = {"ResNet-50": resnet50, "transformer": lambda: transformer(**SMALL)}
QUICK = {"transformer": lambda: transformer(64, 1000, 64)}
NAMES = (OURS, "Open MPI", "gloo", "TensorFlow")
# two ranks of one host have a core each: they need not give it up to each other
ENV = {"OMPI_MCA_mpi_yield_when_idle": "0"}
# hosts, ranks, link
PLACES = ((1, 2, "unlimited"), (2, 4, "1gbit"))


def run(session: Session) -> dict[str, Any]:
    """Measure both networks, on one host and on two."""
    rows = []
    for hosts, ranks, rate in PLACES:
        with (
            Lab(hosts, rate) as lab,
            Contest(lab, ranks, "block", contenders(session, NAMES, ENV if hosts == 1 else None)) as contest,
        ):
            session.versions.update(contest.versions)
            session.environments.missing.update(contest.missing)
            for network, make in (QUICK if session.quick else NETWORKS).items():
                counts = [math.prod(shape) for shape in make()]
                done = contest.alternate(_entries(counts), 0.5 if session.quick else 2.0)
                row = {"hosts": hosts, "ranks": ranks, "rate": rate, "network": network, "arrays": len(counts)}
                rows.append(row | {"nbytes": 4 * sum(counts), "ways": {label: one.document() for label, one in done.items()}})
                session.say(
                    f"{hosts} hosts, {network}: {', '.join(f'{k} {format_seconds(v.seconds)}' for k, v in done.items())}"
                )
    return {"rows": rows}


def table(result: dict[str, Any]) -> str:
    """Return the verdict on goal 5, and the table: times, and that of the flat buffer over each."""
    rows = result["rows"]
    misses = [f"{_where(row)} {_share(row, BATCH):.2f}" for row in rows if _share(row, BATCH) < GOAL]
    labels = list(dict.fromkeys(label for row in rows for label in row["ways"]))
    lines = [
        [label, *(f"{format_seconds(row['ways'][label]['seconds'])} ({_share(row, label):.2f})" for row in rows)]
        for label in labels
    ]
    heads = ["", *(f"{_where(row)}: {row['arrays']} arrays, {format_bytes(row['nbytes'])}" for row in rows)]
    goal = f"one batch of many arrays reaches at least {GOAL} of one flat buffer of as many bytes"
    return f"{verdict(goal, len(rows) - len(misses), misses)}\n{markdown_table(heads, lines)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the time of each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    figure, fields = plt.subplots(1, len(rows), figsize=(4.2 * len(rows), 3.6), squeeze=False, layout="constrained")
    for axes, row in zip(fields.flat, rows, strict=True):
        labels = list(row["ways"])
        axes.barh(
            labels, [row["ways"][label]["seconds"] for label in labels], color=["black", *["tab:gray"] * (len(labels) - 1)]
        )
        axes.invert_yaxis()
        axes.set_title(_where(row), fontsize=9)
        axes.set_xlabel("seconds")
        if axes is not fields.flat[0]:
            axes.set_yticklabels([])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _entries(counts: list[int]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    nbytes = 4 * sum(counts)
    each = {"kind": "many", "how": "each", "counts": counts, "nbytes": nbytes}
    flat = {"kind": "all_reduce", "nbytes": nbytes}
    return {
        BATCH: (OURS, {**each, "how": "batch"}),
        FLAT: (OURS, flat),
        "mpistrat, one call for each": (OURS, each),
        "Open MPI, one flat buffer": ("Open MPI", flat),
        "Open MPI, one call for each": ("Open MPI", each),
        "gloo, one call for each": ("gloo", each),
        "gloo, buckets of DDP": ("gloo", {**each, "how": "ddp"}),
        "TensorFlow, one call": ("TensorFlow", {**each, "how": "batch"}),
    }


def _where(row: dict[str, Any]) -> str:
    return f"{row['network']}, {row['hosts']} host{'s' * (row['hosts'] > 1)} × {row['ranks'] // row['hosts']}"


def _share(row: dict[str, Any], label: str) -> float:
    return float(row["ways"][FLAT]["seconds"] / row["ways"][label]["seconds"])
