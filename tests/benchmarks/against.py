"""Has anything become slower? ``python -m tests.benchmarks.against TREE`` times this tree and another one, in turns.

Both are started side by side, in one lab, and take turns block by block. TREE is a checkout of an earlier commit, as
``git worktree add`` makes it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes, format_seconds, format_table
from tests.benchmarks.contest import Contest
from tests.benchmarks.safety_cost import SIZES, program, take_turns
from tests.hosts.lab import Lab

_NOW, _THEN = "now", "then"
_ROOT = Path(__file__).parents[2]
# hosts, ranks, rate of the links
PLACES = ((1, 2, "unlimited"), (1, 4, "unlimited"), (2, 4, "1gbit"), (4, 8, "1gbit"))
NESTS = (10, 161)


def compare(tree: Path, launches: int, seconds: float) -> list[list[str]]:
    """Return a row for each place and task: the medians of the other tree and of this one, and their difference."""
    rows = []
    for hosts, ranks, rate in PLACES:
        env = {"OMPI_MCA_mpi_yield_when_idle": "0"} if ranks == 2 else {}
        contenders = [program(_NOW, _ROOT, env), program(_THEN, tree, env)]
        tasks = [("seconds_of_a_call", {"nbytes": nbytes}) for nbytes in SIZES]
        tasks += [("seconds_of_a_nest", {"leaves": leaves}) for leaves in NESTS]
        times: list[dict[str, list[float]]] = [{_NOW: [], _THEN: []} for _ in tasks]
        with Lab(hosts, rate) as lab:
            for launch in range(launches):
                with Contest(lab, ranks, "block", contenders[:: -1 if launch % 2 else 1]) as contest:
                    for (task, request), found in zip(tasks, times, strict=True):
                        for name, measured in take_turns(contest, (_NOW, _THEN), task, seconds, **request).items():
                            found[name] += measured
        for (_, request), found in zip(tasks, times, strict=True):
            rows.append([f"{hosts}x{ranks // hosts}", _words(request), *_cells(found)])
            print(*rows[-1], sep="  ", flush=True)
    return rows


def _words(request: Mapping[str, Any]) -> str:
    return format_bytes(request["nbytes"]) if "nbytes" in request else f"dict of {request['leaves']}"


def _cells(found: Mapping[str, Sequence[float]]) -> list[str]:
    pairs = [now / then - 1 for now, then in zip(found[_NOW], found[_THEN], strict=True)]
    lower, middle, upper = statistics.quantiles(pairs, n=4)
    medians = [format_seconds(statistics.median(found[name])) for name in (_THEN, _NOW)]
    return [*medians, f"{middle:+.1%}", f"{lower:+.1%} to {upper:+.1%}"]


def main() -> int:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.against", description=__doc__)
    parser.add_argument("tree", type=Path, metavar="TREE", help="a checkout of the commit to compare with")
    parser.add_argument("--launches", type=int, default=4, metavar="N", help="how often both are started (default: 4)")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="for each task in a launch (default: 3)")
    arguments = parser.parse_args()
    heads = ["where", "what", "then", "now", "median of all pairs", "the middle half of them"]
    print(format_table([heads, *compare(arguments.tree.resolve(), arguments.launches, arguments.seconds)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
