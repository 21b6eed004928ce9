"""Many arrays: the gradients of two networks in one call, against one flat buffer, one call for each, and peers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contenders import OURS, competing
from tests.benchmarks.contest import Measured
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.gradients import resnet50, transformer
from tests.hosts.lab import Lab

BATCH, FLAT = "mpistrat, one batch", "mpistrat, one flat buffer"
SMALL = {"width": 256, "vocabulary": 8000, "positions": 256}
NETWORKS = {"ResNet-50": resnet50, "transformer": lambda: transformer(**SMALL)}
QUICK = {"transformer": lambda: transformer(64, 1000, 64)}
NAMES = (OURS, "Open MPI", "gloo", "TensorFlow")
# hosts, ranks, link
PLACES = ((1, 2, "unlimited"), (2, 4, "1gbit"))


def run(session: Session) -> dict[str, Table]:
    """Measure both networks, on one host and on two: how many times as long as mpistrat's flat buffer each way takes."""
    columns: dict[str, dict[str, Measured]] = {}
    for hosts, ranks, rate in PLACES:
        with Lab(hosts, rate) as lab, competing(session, lab, ranks, names=NAMES) as contest:
            for network, make in (QUICK if session.quick else NETWORKS).items():
                counts = [math.prod(shape) for shape in make()]
                where = f"{network} on {hosts}×{ranks // hosts}"
                done = contest.alternate(_entries(counts), 0.5 if session.quick else 2.0)
                columns[where] = done
                said = ", ".join(f"{label} {format_seconds(one.seconds)}" for label, one in done.items())
                session.say(f"{where}, {len(counts)} arrays, {format_bytes(4 * sum(counts))}: {said}")
    labels = dict.fromkeys(label for done in columns.values() for label in done)
    lines = [
        [label, *(f"{done[label]}, × {done[label].seconds / done[FLAT].seconds:.2f}" for done in columns.values())]
        for label in labels
    ]
    return {"": [["what", *columns], *lines]}


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
