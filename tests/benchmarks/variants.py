"""All-reduces beside variants of them, in turns: a part of the result, fewer bytes between nodes, sums in one order."""

import json
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contest import OURS, Measured, all_reduces, competing
from tests.benchmarks.messages import KIB, MIB, shape_of
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session, answers_of
from tests.hosts.lab import Lab

PEER = "Open MPI"
SCATTER, WHOLE = "reduce_scatter", "all_reduce"
ENTRIES = {SCATTER: (OURS, SCATTER), WHOLE: (OURS, WHOLE), PEER: (PEER, SCATTER)}
# hosts, ranks, link
SCATTERS = ((1, 2, "unlimited"), (1, 4, "unlimited"), (2, 4, "1gbit"))


def reduce_scatter(session: Session) -> dict[str, Table]:
    """Reduce-scatter: against our all-reduce of the same array, and against MPI's own, with the bytes that cross the links."""
    heads = ["hosts × ranks", "size", "`reduce_scatter`", "`all_reduce`", "`MPI_Reduce_scatter`"]
    lines = [[*heads, "all_reduce / reduce_scatter", f"{PEER} / reduce_scatter"]]
    for hosts, ranks, rate in SCATTERS[:1] if session.quick else SCATTERS:
        with Lab(hosts, rate) as lab, competing(session, lab, ranks, names=(OURS, PEER)) as contest:
            for nbytes in (MIB, 4 * MIB, 16 * MIB):
                entries = {name: (program, {"kind": kind, "nbytes": nbytes}) for name, (program, kind) in ENTRIES.items()}
                found = contest.alternate(entries, 1.0, share=0.5)
                times = [_time(found[name], hosts) if name in found else "–" for name in ENTRIES]
                ours = found[SCATTER].seconds
                ratios = [f"{found[name].seconds / ours:.2f}" if name in found else "–" for name in (WHOLE, PEER)]
                session.add(lines, [shape_of(hosts, ranks), format_bytes(nbytes), *times, *ratios])
    return {"": lines}


def _time(measured: Measured, hosts: int) -> str:
    """Return the time, and how many bytes crossed the links, over the least that a reduce-scatter must send."""
    return f"{measured}, {measured.sent_share:.2f} of the bytes" if hosts > 1 else str(measured)


FLOAT32 = "float32"
# what each is called, and the options that ask for it
WIRES: dict[str, dict[str, Any]] = {
    FLOAT32: {},
    "bfloat16": {"wire_dtype": "bfloat16"},
    "float16": {"wire_dtype": "float16"},
}
TRAINED = {**WIRES, "float32, another order": {"deterministic": True}}
TRAINING = "batches of 128, shuffled"
NBYTES, PLACEMENTS = 16 << 20, ("block", "cyclic")


def wire_dtype(session: Session) -> dict[str, Table]:
    """Wire dtypes: what halving the bytes between nodes gains, and what rounding them does to a training."""
    times = [["placement", *WIRES]]
    with Lab(4, "1gbit") as lab:
        for placement in PLACEMENTS[:1] if session.quick else PLACEMENTS:
            with competing(session, lab, 8, placement) as contest:
                found = contest.alternate(all_reduces(NBYTES, WIRES), 2.0, share=0.5)
            exact = found[FLOAT32].seconds
            cells = [
                f"{format_seconds(one.seconds)} (best {format_seconds(min(one.times))}), × {exact / one.seconds:.2f}"
                for one in found.values()
            ]
            session.add(times, [placement, *cells])
    heads = ["training", "between nodes", "last loss", "test accuracy", "loss off by at most", "weights off by"]
    return {"": times, "training": [heads, *([] if session.quick else _trained(session))]}


def _trained(session: Session) -> Table:
    """Train in every way on virtual nodes of a rank."""
    own = {"MPISTRAT_VIRTUAL_NODES": "4x1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    [found] = answers_of(4, "wire_dtype_ranks.py", json.dumps(TRAINED), **own)
    session.say(f"trained {len(TRAINED)} networks")
    rows = []
    for kind, one in found.items():
        loss, accuracy, distance = f"{one['losses'][-1]:.6f}", f"{one['accuracy']:.4f}", f"{one['distance']:.1e}"
        off = max(abs(mine / exact - 1) for mine, exact in zip(one["losses"], found[FLOAT32]["losses"], strict=True))
        rows.append([TRAINING, kind, loss, accuracy, f"{off:.1e}", distance])
    return rows


DEFAULT, IN_ORDER = "default", "deterministic"
ORDERS: dict[str, dict[str, Any]] = {DEFAULT: {}, IN_ORDER: {"deterministic": True}}
# hosts, ranks, link, sizes
IN_ORDERS = ((1, 2, "unlimited", (64 * KIB, MIB, 16 * MIB)), (4, 8, "1gbit", (64 * KIB, MIB, 16 * MIB)))


def deterministic(session: Session) -> dict[str, Table]:
    """Deterministic mode: what adding in the order of the replicas costs."""
    times = [["hosts × ranks", "size", *ORDERS, "deterministic / default"]]
    for hosts, ranks, rate, sizes in IN_ORDERS[:1] if session.quick else IN_ORDERS:
        with Lab(hosts, rate) as lab, competing(session, lab, ranks) as contest:
            for nbytes in sizes:
                found = contest.alternate(all_reduces(nbytes, ORDERS), 0.8)
                cells = [f"{format_seconds(one.seconds)} ({one.facts['plan']})" for one in found.values()]
                ratio = f"{found[IN_ORDER].seconds / found[DEFAULT].seconds:.2f}"
                session.add(times, [shape_of(hosts, ranks), format_bytes(nbytes), *cells, ratio])
    return {"": times}
