"""What a call of ours costs, hides and holds; and many arrays in one call, beside one flat buffer, single calls, and peers."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contest import OURS, Measured, competing
from tests.benchmarks.messages import MIB, shape_of
from tests.benchmarks.pages import Table, spread
from tests.benchmarks.session import Session
from tests.gradients import resnet50
from tests.hosts.lab import Lab

LEAVES = (1, 10, 161)  # of the nest
FORM_SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 22)


def overhead(session: Session) -> dict[str, Table]:
    """Overhead: what a call costs on top of bare MPI, for nests of 1 to 161 arrays and in every form, on one host."""
    times = 2 if session.quick else 7
    nests = [["arrays", "bare MPI_Allreduce of the bytes", "context.all_reduce", "on top (least to most of the runs)"]]
    forms: dict[str, list[str]] = {}
    with Lab(1, "unlimited") as lab, competing(session, lab, 2) as contest:
        for leaves in LEAVES:
            runs = [contest.call(OURS, "overhead", leaves=leaves, calls=20)[0] for _ in range(times)]
            medians = [f"{statistics.median(run[name] for run in runs) * 1e6:.1f} µs" for name in ("bare", "ours")]
            added = [(run["ours"] - run["bare"]) * 1e6 for run in runs]
            on_top = f"{statistics.median(added):.1f} µs ({min(added):.1f} to {max(added):.1f})"
            session.add(nests, [f"{leaves} of 8 bytes", *medians, on_top])
        for nbytes in FORM_SIZES:
            runs = [contest.call(OURS, "forms", nbytes=nbytes, calls=20)[0] for _ in range(min(times, 5))]
            for form in runs[0]:
                forms.setdefault(form, []).append(spread([run[form] for run in runs]))
            session.say(f"every form of a call with {format_bytes(nbytes)}")
    return {"": nests, "forms": [["call", *map(format_bytes, FORM_SIZES)], *([form, *cells] for form, cells in forms.items())]}


# link, bytes, buckets, what is computed
OVERLAPS = (
    ("1gbit", 16 * MIB, 16, "matmul"),
    ("1gbit", 64 * MIB, 32, "matmul"),
    ("1gbit", 64 * MIB, 32, "elementwise"),
    ("500mbit", 64 * MIB, 32, "matmul"),
    ("250mbit", 16 * MIB, 16, "matmul"),
)


def overlap(session: Session) -> dict[str, Table]:
    """Overlap: a step that reduces gradients while it computes, against computing and reducing alone, on two hosts."""
    lines = [["link", "gradients", "computing", "computing alone", "reducing alone", "both", "both / the longer"]]
    for rate, nbytes, buckets, kind in OVERLAPS[:1] if session.quick else OVERLAPS:
        with Lab(2, rate) as lab, competing(session, lab, 2) as contest:
            [times, *_] = contest.call(OURS, "overlap", nbytes=nbytes, num_buckets=buckets, kind=kind)
        ratio = f"{times[-1] / max(times[:-1]):.2f}"
        session.add(lines, [rate, f"{format_bytes(nbytes)} in {buckets}", kind, *map(format_seconds, times), ratio])
    return {"": lines}


# auto may leave a buffer to MPI, whose memory is not counted
ALGORITHMS = ("auto", "hierarchical")
# hosts, ranks, placement
PLACES = ((1, 2, "block"), (1, 4, "block"), (2, 4, "block"), (2, 4, "3+1"), (4, 4, "block"))
VALUES = {
    "one array of 16 MiB": lambda: [4 * MIB],
    "one array of 64 MiB": lambda: [16 * MIB],
    "ResNet-50's 161 gradients": lambda: [math.prod(shape) for shape in resnet50()],
}


def memory(session: Session) -> dict[str, Table]:
    """Memory: what the rank holds that holds the most, over the largest pack, and what further calls allocate."""
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
                    session.add(lines, [shape_of(hosts, ranks, placement), placement, algorithm, value, *cells])
    return {"": lines}


BATCH, FLAT = "mpistrat, one batch", "mpistrat, one flat buffer"
NAMES = (OURS, "Open MPI", "gloo", "TensorFlow")
# hosts, ranks, link
NETWORK_PLACES = ((1, 2, "unlimited"), (2, 4, "1gbit"))


def many_arrays(session: Session) -> dict[str, Table]:
    """Measure ResNet-50, on one host and on two: how many times as long as mpistrat's flat buffer each way takes."""
    columns: dict[str, dict[str, Measured]] = {}
    counts = [math.prod(shape) for shape in resnet50()[: 20 if session.quick else None]]
    for hosts, ranks, rate in NETWORK_PLACES:
        with Lab(hosts, rate) as lab, competing(session, lab, ranks, names=NAMES) as contest:
            where = f"ResNet-50 on {hosts}×{ranks // hosts}"
            done = columns[where] = contest.alternate(_entries(counts), 0.5 if session.quick else 2.0)
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
