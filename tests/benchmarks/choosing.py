"""Choosing: what auto takes after mpistrat tune, against every algorithm asked for by name."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mpistrat.algorithms.choose import PLANNERS
from mpistrat.text import format_bytes, format_seconds
from mpistrat.topology.world import World
from tests.benchmarks.contenders import competing
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

KIB, MIB = 1 << 10, 1 << 20
AUTO = "auto"
# sizes that were measured for the tuning, and sizes between and beyond them
SIZES = (8, 192, KIB, 6 * KIB, 24 * KIB, 48 * KIB, 96 * KIB, 192 * KIB, 384 * KIB, 768 * KIB, 3 * MIB, 6 * MIB, 16 * MIB)
_TUNE_SECONDS, _TURNS = 120, 4


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


def run(session: Session) -> dict[str, Table]:
    """Tune, and time every size in every place; the last column is auto over the best algorithm of a fixed name."""
    heads = ["hosts × ranks", "placement", "size", *PLANNERS, AUTO, "auto chose", "that one / best", "auto / best"]
    return {"": [heads, *(line for place in (QUICK if session.quick else PLACES) for line in _measure(session, place))]}


def _measure(session: Session, place: _Place) -> Table:
    world, lines = World.from_shape(place.shape), []
    with Lab(world.num_nodes, place.rate) as lab:
        kept = {"MPISTRAT_TUNING": str(lab.folder / "tuned.json")}
        argv = [sys.executable, "-m", "mpistrat", "tune"]
        tuned = lab.run(world.size, place.placement, argv, timeout=_TUNE_SECONDS, env=kept)
        if tuned.returncode:
            raise RuntimeError(f"mpistrat tune failed on {place.shape}: {tuned.stderr}")
        with competing(session, lab, world.size, place.placement, **kept) as contest:
            for nbytes in place.sizes:
                chosen, seconds = _in_turns(contest, place, nbytes)
                best = min(seconds[name] for name in PLANNERS)
                times = [format_seconds(seconds[name]) for name in (*PLANNERS, AUTO)]
                ratios = [f"{seconds[name] / best:.2f}" for name in (chosen, AUTO)]
                where = [place.shape.replace("x", "×"), place.placement]
                lines.append([*where, format_bytes(nbytes), *times, chosen, *ratios])
                session.say(", ".join(lines[-1]))
    return lines


def _in_turns(contest: Contest, place: _Place, nbytes: int) -> tuple[str, dict[str, float]]:
    """Return what auto chooses, and the time of each algorithm by its name, and of auto: each several times over."""
    tasks = {
        name: {"kind": "all_reduce", "nbytes": nbytes, "options": {"algorithm": name}} for name in (*reversed(PLANNERS), AUTO)
    }
    found = contest.in_turns(tasks, _TURNS, place.seconds / _TURNS)
    return found[AUTO][0].facts["plan"], {name: statistics.median(one.seconds for one in some) for name, some in found.items()}
