"""Memory: what is held to communicate, over the largest pack, and what further calls allocate."""

from __future__ import annotations

import math

from mpistrat.text import format_bytes
from tests.benchmarks.contenders import OURS, competing
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


def run(session: Session) -> dict[str, Table]:
    """Look at every place with every value, each in programs of their own: what the rank holds that holds the most."""
    heads = ["hosts × ranks", "placement", "algorithm", "value", "held", "largest pack"]
    lines = [[*heads, "kept by ten more calls", "most in them"]]
    values = dict(list(VALUES.items())[:1]) if session.quick else VALUES
    for hosts, ranks, placement in PLACES[1:3] if session.quick else PLACES:
        with Lab(hosts, "unlimited") as lab:
            for value, make in values.items():
                for algorithm in ALGORITHMS:
                    with competing(session, lab, ranks, placement) as contest:
                        reports = contest.call(OURS, "memory", counts=make(), options={"algorithm": algorithm})
                    most = max(reports, key=lambda report: report["total_bytes"])
                    sizes = [most[f"{name}_bytes"] for name in ("total", "largest_pack", "grown", "peak")]
                    cells = [format_bytes(max(size, 0)) for size in sizes]
                    lines.append([shape_of(hosts, ranks, placement), placement, algorithm, value, *cells])
                    session.say(", ".join(lines[-1]))
    return {"": lines}
