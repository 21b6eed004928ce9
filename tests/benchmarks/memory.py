"""Memory: what is held to communicate, over the largest pack, and what further calls allocate."""

from __future__ import annotations

import math
from typing import Any

from mpistrat.text import format_bytes
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.messages import shape_of
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.gradients import resnet50
from tests.hosts.lab import Lab

MIB = 1 << 20
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
                    session.say(", ".join(tables({"rows": rows[-1:]})[""][1]))
    return {"rows": rows}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return what the rank holds that holds the most."""
    heads = [
        "hosts × ranks",
        "placement",
        "algorithm",
        "value",
        "held",
        "largest pack",
        "kept by ten more calls",
        "most in them",
    ]
    lines = [
        [
            shape_of(row),
            row["placement"],
            row["algorithm"],
            row["value"],
            *(format_bytes(max(row[f"{name}_bytes"], 0)) for name in ("total", "largest_pack", "grown", "peak")),
        ]
        for row in result["rows"]
    ]
    return {"": [heads, *lines]}
