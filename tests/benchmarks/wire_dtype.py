"""Wire dtypes: what halving the bytes between nodes gains, and what rounding them does to a training."""

from __future__ import annotations

import json
from typing import Any

from mpistrat.text import format_seconds
from tests.benchmarks.contenders import all_reduces, competing
from tests.benchmarks.contest import Measured
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session, answers_of
from tests.hosts.lab import Lab

FLOAT32, FEEDBACK = "float32", "bfloat16, error feedback"
# what each is called, and the options that ask for it
KINDS: dict[str, dict[str, Any]] = {
    FLOAT32: {},
    "bfloat16": {"wire_dtype": "bfloat16"},
    "float16": {"wire_dtype": "float16"},
    FEEDBACK: {"wire_dtype": "bfloat16", "error_feedback": True},
}
TRAINED = {**KINDS, "float32, another order": {"deterministic": True}}
TRAINING = "batches of 128, shuffled"
NBYTES, PLACEMENTS = 16 << 20, ("block", "cyclic")
SHAPE, NUM_RANKS = "4x1", 4


def run(session: Session) -> dict[str, Table]:
    """Time all-reduces in each placement, and train in each way."""
    times = [["placement", *KINDS]]
    with Lab(4, "1gbit") as lab:
        for placement in PLACEMENTS[:1] if session.quick else PLACEMENTS:
            with competing(session, lab, 8, placement) as contest:
                found = contest.alternate(all_reduces(NBYTES, KINDS), 2.0, share=0.5)
            times.append([placement, *(_cell(one, found[FLOAT32]) for one in found.values())])
            session.say(", ".join(times[-1]))
    heads = ["training", "between nodes", "last loss", "test accuracy", "loss off by at most", "weights off by"]
    return {"": times, "training": [heads, *([] if session.quick else _trained(session))]}


def _trained(session: Session) -> Table:
    """Train in every way on virtual nodes of a rank."""
    own = {"MPISTRAT_VIRTUAL_NODES": SHAPE, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    [found] = answers_of(NUM_RANKS, "wire_dtype_ranks.py", json.dumps(TRAINED), **own)
    session.say(f"trained {len(TRAINED)} networks")
    rows = []
    for kind, one in found.items():
        loss, accuracy, distance = f"{one['losses'][-1]:.6f}", f"{one['accuracy']:.4f}", f"{one['distance']:.1e}"
        rows.append([TRAINING, kind, loss, accuracy, _off(one, found[FLOAT32]), distance])
    return rows


def _cell(one: Measured, exact: Measured) -> str:
    best = format_seconds(min(one.times))
    return f"{format_seconds(one.seconds)} (best {best}), × {exact.seconds / one.seconds:.2f}"


def _off(one: dict[str, Any], exact: dict[str, Any]) -> str:
    """Return by how much a loss differs at most from that with float32 in any step, relative to it."""
    return f"{max(abs(loss / other - 1) for loss, other in zip(one['losses'], exact['losses'], strict=True)):.1e}"
