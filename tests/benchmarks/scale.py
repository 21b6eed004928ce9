"""Scale: 2 to 16 hosts measured, the model fitted on some and held against the others, then thousands of nodes predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mpistrat.algorithms.cost import DEFAULT
from mpistrat.algorithms.scale import PREDICTORS, assumptions_text, predict_scale
from mpistrat.text import format_bytes, format_seconds
from mpistrat.topology.world import World
from mpistrat.tuning.fit import CONSTANTS, Measurement, fit, modelled_seconds
from tests.benchmarks.cases import verdict
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

__all__ = ["draw", "run", "table"]

KIB, MIB = 1 << 10, 1 << 20
HOSTS, FITTED = (2, 4, 8, 16), (2, 8)
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
RATE, LINK_BYTES_PER_SECOND, WITHIN = "50mbit", 6e6, 0.15
ALGORITHM = "hierarchical"
NODES = (2, 4, 8, 16, 64, 256, 1024, 4096, 10_000)
PREDICTED_BYTES, PREDICTED_RANKS = 64 * MIB, 8


def run(session: Session) -> dict[str, Any]:
    """Measure one algorithm on 2 to 16 hosts of one rank, and fit the constants to half of them."""
    hosts, sizes = ((2, 4, 8), (256 * KIB, MIB)) if session.quick else (HOSTS, SIZES)
    rows = [row for count in hosts for row in _measure(session, count, sizes)]
    model = fit(
        [_measurement(row) for row in rows if row["hosts"] in FITTED],
        replace(DEFAULT, link_bytes_per_second=LINK_BYTES_PER_SECOND),
    )
    for row in rows:
        row["predicted_seconds"] = modelled_seconds(_measurement(row), model)
    return {"rows": rows, "constants": {name: getattr(model, name) for name in CONSTANTS}}


def table(result: dict[str, Any]) -> str:
    """Return the verdict on goal 11, what was measured and predicted, and predictions for thousands of nodes."""
    rows = result["rows"]
    judged = [row for row in rows if row["hosts"] not in FITTED]
    misses = [
        f"{row['hosts']} hosts {format_bytes(row['nbytes'])} {_error(row):+.0%}" for row in judged if abs(_error(row)) > WITHIN
    ]
    lines = [
        [
            f"{row['hosts']}{' (fitted)' if row['hosts'] in FITTED else ''}",
            format_bytes(row["nbytes"]),
            *(format_seconds(row[name]) for name in ("seconds", "predicted_seconds")),
            f"{_error(row):+.0%}",
        ]
        for row in rows
    ]
    goal = f"predictions for hosts that were not fitted are within {WITHIN:.0%} of what is measured"
    found = [predict_scale(count, PREDICTED_RANKS, PREDICTED_BYTES) for count in NODES]
    far = [[name, *(format_seconds(seconds[name]) for seconds in found)] for name in PREDICTORS]
    return (
        f"{verdict(goal, len(judged) - len(misses), misses)}\n"
        f"{markdown_table(['hosts', 'size', 'measured', 'predicted', 'error'], lines)}\n"
        f"Predicted, not measured: {format_bytes(PREDICTED_BYTES)}, {PREDICTED_RANKS} ranks on each node, by number of nodes. "
        "Assumed:\n\n"
        f"```text\n{assumptions_text()}\n```\n\n{markdown_table(['nodes', *map(str, NODES)], far)}"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw what was measured beside its prediction, and the predictions for thousands of nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (near, far) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for index, nbytes in enumerate(dict.fromkeys(row["nbytes"] for row in result["rows"])):
        there = [row for row in result["rows"] if row["nbytes"] == nbytes]
        hosts = [row["hosts"] for row in there]
        near.plot(hosts, [row["seconds"] for row in there], "o", color=f"C{index}", label=format_bytes(nbytes))
        near.plot(hosts, [row["predicted_seconds"] for row in there], "--", color=f"C{index}")
    near.set_title(f"measured (dots) and predicted, links of {RATE}", fontsize=9)
    near.set_xlabel("hosts")
    for name in PREDICTORS:
        times = [predict_scale(count, PREDICTED_RANKS, PREDICTED_BYTES)[name] for count in NODES]
        far.plot(NODES, times, "o-" if "mpistrat" in name else "o--", markersize=3, label=name)
    far.set_title(f"predicted: {format_bytes(PREDICTED_BYTES)}, {PREDICTED_RANKS} ranks on each node", fontsize=9)
    far.set_xlabel("nodes")
    for axes in (near, far):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylabel("seconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.supxlabel(f"Assumed on the right: {assumptions_text()}", fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _measure(session: Session, hosts: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    with Lab(hosts, RATE) as lab, Contest(lab, hosts, "block", contenders(session, (OURS,))) as contest:
        goodput = lab.goodput_bits(rounds=2, seconds=1.2)
        for nbytes in sizes:
            task = {"kind": "all_reduce", "nbytes": nbytes, "options": {"algorithm": ALGORITHM}}
            [done] = contest.compare(task, 0.5 if session.quick else 3.0).values()
            rows.append({"hosts": hosts, "nbytes": nbytes, "goodput_bits": goodput, **done.document()})
            session.say(f"{hosts} hosts, {format_bytes(nbytes)}: {format_seconds(done.seconds)}")
    return rows


def _measurement(row: dict[str, Any]) -> Measurement:
    return Measurement(World.from_shape(f"{row['hosts']}x1"), ALGORITHM, row["nbytes"], row["seconds"])


def _error(row: dict[str, Any]) -> float:
    return float(row["predicted_seconds"] / row["seconds"] - 1)
