"""Choosing: what auto takes after mpistrat tune, against every algorithm asked for by name."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpistrat.algorithms.choose import PLANNERS
from mpistrat.text import format_bytes, format_seconds
from mpistrat.topology.world import World
from tests.benchmarks.contest import Contender, Contest, Measured
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

KIB, MIB = 1 << 10, 1 << 20
AUTO = "auto"
# sizes that were measured for the tuning, and sizes between and beyond them
SIZES = (8, 192, KIB, 6 * KIB, 24 * KIB, 48 * KIB, 96 * KIB, 192 * KIB, 384 * KIB, 768 * KIB, 3 * MIB, 6 * MIB, 16 * MIB)
_TUNE_SECONDS, _TURNS = 120, 4
_RANK = Path(__file__).parent / "peers" / "choosing_ranks.py"


@dataclass(frozen=True)
class _Place:
    """Ranks in a lab."""

    shape: str
    placement: str
    rate: str
    sizes: Sequence[int] = SIZES
    seconds: float = 0.3


PLACES = (
    _Place("1x2", "block", "unlimited", (*SIZES, 32 * MIB), 0.6),
    _Place("1x4", "block", "unlimited", (*SIZES, 32 * MIB), 0.6),
    _Place("2x1", "block", "1gbit"),
    _Place("4x2", "block", "1gbit", SIZES[:-1]),
    _Place("4x2", "cyclic", "1gbit", SIZES[:-1]),
)
QUICK = (_Place("1x2", "block", "unlimited", (8, 96 * KIB, 6 * MIB), 0.2), _Place("2x1", "block", "1gbit", (KIB, MIB), 0.2))


def run(session: Session) -> dict[str, Any]:
    """Tune, and measure every size, in every place."""
    return {"rows": [row for place in (QUICK if session.quick else PLACES) for row in _measure(session, place)]}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times; the last column is auto over the best algorithm of a fixed name."""
    rows = result["rows"]
    names = [name for name in PLANNERS if any(name in row["seconds"] for row in rows)]
    lines = [
        [
            row["shape"].replace("x", "×"),
            row["placement"],
            format_bytes(row["nbytes"]),
            *(format_seconds(row["seconds"][name]) if name in row["seconds"] else "–" for name in names),
            format_seconds(row["seconds"][AUTO]),
            row["chosen"],
            f"{_regret(row):.2f}",
            f"{_ratio(row):.2f}",
        ]
        for row in rows
    ]
    heads = ["hosts × ranks", "placement", "size", *names, AUTO, "auto chose", "that one / best", "auto / best"]
    return {"": [heads, *lines]}


def _measure(session: Session, place: _Place) -> list[dict[str, Any]]:
    world, rows = World.from_shape(place.shape), []
    with Lab(world.num_nodes, place.rate) as lab:
        kept = str(lab.folder / "tuned.json")
        tuned = lab.run(
            world.size,
            place.placement,
            [sys.executable, "-m", "mpistrat", "tune"],
            timeout=_TUNE_SECONDS,
            env={"MPISTRAT_TUNING": kept},
            capture=True,
        )
        if tuned.returncode:
            raise RuntimeError(f"mpistrat tune failed on {place.shape}: {tuned.stderr}")
        program = Contender("mpistrat", "openmpi", [sys.executable, str(_RANK)], {"MPISTRAT_TUNING": kept})
        with Contest(lab, world.size, place.placement, [program]) as contest:
            for nbytes in place.sizes:
                rows.append(_row(contest, place, [AUTO, *PLANNERS], nbytes))
                session.say(f"{_where(rows[-1])}, {format_bytes(nbytes)}: {rows[-1]['chosen']}, {_ratio(rows[-1]):.2f}")
    return rows


def _row(contest: Contest, place: _Place, names: Sequence[str], nbytes: int) -> dict[str, Any]:
    """Time all names in turn, several times over."""
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for turn in range(_TURNS):
        for name in names if turn % 2 else reversed(names):
            task = {"kind": "all_reduce", "nbytes": nbytes, "algorithm": name}
            found[name] += contest.compare(task, place.seconds / _TURNS).values()
    return {
        "shape": place.shape,
        "placement": place.placement,
        "rate": place.rate,
        "nbytes": nbytes,
        "chosen": found[AUTO][0].facts["plan"],
        "seconds": {name: statistics.median(one.seconds for one in some) for name, some in found.items()},
    }


def _where(row: dict[str, Any]) -> str:
    return f"{row['shape']} {row['placement']}"


def _best(row: dict[str, Any]) -> float:
    return min(seconds for name, seconds in row["seconds"].items() if name != AUTO)


def _ratio(row: dict[str, Any]) -> float:
    return float(row["seconds"][AUTO] / _best(row))


def _regret(row: dict[str, Any]) -> float:
    return float(row["seconds"][row["chosen"]] / _best(row))
