"""Wire dtypes: what halving the bytes between nodes gains, and what rounding them does to a training."""

from __future__ import annotations

import json
from typing import Any

from mpistrat.text import format_seconds
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest, Measured
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
NBYTES, PLACEMENTS = 16 << 20, ("block", "cyclic")
SHAPE, NUM_RANKS = "4x1", 4
TRAININGS: dict[str, dict[str, Any]] = {
    "batches of 128, shuffled": {"epochs": 12, "batch": 128, "rate": 0.1, "shuffled": True},
    "all images, each replica has other digits": {"epochs": 200, "batch": 1497, "rate": 0.05, "shuffled": False},
}


def run(session: Session) -> dict[str, Any]:
    """Time all-reduces in each placement, and train in each way."""
    with Lab(4, "1gbit") as lab:
        if session.quick:
            return {"rows": [_measure(session, lab, PLACEMENTS[0])], "trainings": {}}
        rows = [_measure(session, lab, placement) for placement in PLACEMENTS]
    own = {"MPISTRAT_VIRTUAL_NODES": SHAPE, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    [trainings] = answers_of(NUM_RANKS, "wire_dtype_ranks.py", json.dumps(TRAININGS), json.dumps(TRAINED), env=own)
    session.say(f"trained {len(trainings)} times {len(TRAINED)} networks")
    return {"rows": rows, "trainings": trainings}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times, and what became of the trainings."""
    times = [[row["placement"], *(_cell(row, name) for name in KINDS)] for row in result["rows"]]
    lines = [
        [
            name,
            kind,
            f"{one['losses'][-1]:.6f}",
            f"{one['accuracy']:.4f}",
            f"{max(_off(found, kind)):.1e}",
            f"{one['distance']:.1e}",
        ]
        for name, found in result["trainings"].items()
        for kind, one in found.items()
    ]
    heads = ["training", "between nodes", "last loss", "test accuracy", "loss off by at most", "weights off by"]
    return {"": [["placement", *KINDS], *times], "training": [heads, *lines]}


def _measure(session: Session, lab: Lab, placement: str) -> dict[str, Any]:
    """Time all kinds in one program."""
    found: dict[str, Measured] = {}
    with Contest(lab, 8, placement, contenders(session, (OURS,))) as contest:
        session.versions.update(contest.versions)
        for name, fields in KINDS.items():
            task = {"kind": "all_reduce", "nbytes": NBYTES, "options": fields}
            [found[name]] = contest.compare(task, 2.0, share=1.0 if name == FLOAT32 else 0.5).values()
    row = {
        "placement": placement,
        "seconds": {name: one.seconds for name, one in found.items()},
        "best_seconds": {name: one.best_seconds for name, one in found.items()},
        "repeats": {name: one.repeats for name, one in found.items()},
    }
    session.say(f"{placement}: {', '.join(f'{name} {_gain(row, name):.2f}' for name in KINDS)}")
    return row


def _cell(row: dict[str, Any], name: str) -> str:
    seconds, best = (format_seconds(row[name_of][name]) for name_of in ("seconds", "best_seconds"))
    return f"{seconds} (best {best}), {_gain(row, name):.2f} as fast"


def _gain(row: dict[str, Any], name: str) -> float:
    return float(row["seconds"][FLOAT32] / row["seconds"][name])


def _off(found: dict[str, Any], kind: str) -> list[float]:
    """Return by how much the loss differs from that with float32 after each epoch, relative to it."""
    return [abs(loss / exact - 1) for loss, exact in zip(found[kind]["losses"], found[FLOAT32]["losses"], strict=True)]
