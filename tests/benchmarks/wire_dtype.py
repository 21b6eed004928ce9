"""Wire dtypes: what halving the bytes between nodes gains, and what rounding them does to a training."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mpistrat.launch.mpiexec import command
from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.cases import verdict
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest, Measured
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab
from tests.processes import run_bounded

__all__ = ["draw", "run", "table"]

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
FASTER, WITHIN = 1.8, 0.01
_RANK = Path(__file__).parent / "peers" / "wire_dtype_ranks.py"


def run(session: Session) -> dict[str, Any]:
    """Time all-reduces in each placement, and train in each way."""
    with Lab(4, "1gbit") as lab:
        if session.quick:
            return {"rows": [_measure(session, lab, PLACEMENTS[0])], "trainings": {}}
        rows = [_measure(session, lab, placement) for placement in PLACEMENTS]
    return {"rows": rows, "trainings": _train(session)}


def table(result: dict[str, Any]) -> str:
    """Return the verdicts on goal 4, and the tables."""
    rows = result["rows"]
    misses = [
        f"{row['placement']} {name} {_gain(row, name):.2f}"
        for row in rows
        for name in KINDS
        if name != FLOAT32 and _gain(row, name) < FASTER
    ]
    goal = f"at least {FASTER} times as fast as float32 at {format_bytes(NBYTES)}"
    times = [[row["placement"], *(_cell(row, name) for name in KINDS)] for row in rows]
    first = verdict(goal, len(rows) * (len(KINDS) - 1) - len(misses), misses)
    return f"{first}\n{markdown_table(['placement', *KINDS], times)}{_table_of_trainings(result['trainings'])}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the loss of each training, and below how far it is from that with float32."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    trainings = result["trainings"]
    figure, fields = plt.subplots(2, max(1, len(trainings)), figsize=(11, 6), sharex="col", squeeze=False, layout="constrained")
    for (upper, lower), (name, found) in zip(fields.T, trainings.items(), strict=False):
        for kind, one in found.items():
            epochs = range(1, len(one["losses"]) + 1)
            style = {"color": "black"} if kind == FLOAT32 else {}
            upper.plot(epochs, one["losses"], label=kind, linewidth=1.2, **style)
            if kind != FLOAT32:
                lower.plot(epochs, _off(found, kind), label=kind, linewidth=1.2)
        upper.set_title(name, fontsize=9)
        upper.set_ylabel("loss of all training images")
        lower.set_ylabel("off from float32, relative")
        lower.set_xlabel("epoch")
        for axes in (upper, lower):
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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


def _train(session: Session) -> dict[str, Any]:
    argv, variables = command(NUM_RANKS, [sys.executable, str(_RANK), json.dumps(TRAININGS), json.dumps(TRAINED)])
    own = {"MPISTRAT_VIRTUAL_NODES": SHAPE, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = run_bounded(argv, 120, {**os.environ, **variables, **own})
    if done.returncode:
        raise RuntimeError(f"the training failed: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    session.say(f"trained {len(found)} times {len(TRAINED)} networks")
    return found


def _table_of_trainings(trainings: dict[str, Any]) -> str:
    if not trainings:
        return ""
    worst = {name: max(_off(found, FEEDBACK)) for name, found in trainings.items()}
    misses = [f"{name} {off:.1%}" for name, off in worst.items() if off > WITHIN]
    goal = f"with error feedback the loss is within {WITHIN:.0%} of that with float32 after every epoch"
    lines = [
        [
            name,
            kind,
            f"{one['losses'][-1]:.6f}",
            f"{one['accuracy']:.4f}",
            f"{max(_off(found, kind)):.1e}",
            f"{one['distance']:.1e}",
        ]
        for name, found in trainings.items()
        for kind, one in found.items()
    ]
    heads = ["training", "between nodes", "last loss", "test accuracy", "loss off by at most", "weights off by"]
    return f"\n{verdict(goal, len(trainings) - len(misses), misses)}\n{markdown_table(heads, lines)}"


def _cell(row: dict[str, Any], name: str) -> str:
    return f"{format_seconds(row['seconds'][name])} ({_gain(row, name):.2f}), best {format_seconds(row['best_seconds'][name])}"


def _gain(row: dict[str, Any], name: str) -> float:
    return float(row["seconds"][FLOAT32] / row["seconds"][name])


def _off(found: dict[str, Any], kind: str) -> list[float]:
    """Return by how much the loss differs from that with float32 after each epoch, relative to it."""
    return [abs(loss / exact - 1) for loss, exact in zip(found[kind]["losses"], found[FLOAT32]["losses"], strict=True)]
