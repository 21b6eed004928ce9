"""Many arrays: the gradients of two networks in one call, against one flat buffer, one call for each, and peers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import Table, spread
from tests.benchmarks.session import Session
from tests.gradients import resnet50, transformer
from tests.hosts.lab import Lab

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


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times, and how many times as long as mpistrat's flat buffer each takes."""
    rows = result["rows"]
    labels = list(dict.fromkeys(label for row in rows for label in row["ways"]))
    lines = [[label, *(f"{spread(row['ways'][label])}, × {_times(row, label):.2f}" for row in rows)] for label in labels]
    return {"": [["", *(f"{_where(row)}: {row['arrays']} arrays, {format_bytes(row['nbytes'])}" for row in rows)], *lines]}


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


def _times(row: dict[str, Any], label: str) -> float:
    return float(row["ways"][label]["seconds"] / row["ways"][FLAT]["seconds"])
