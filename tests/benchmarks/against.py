"""Has anything become slower? ``python -m tests.benchmarks.against TREE`` times this tree and another one, in turns.

Both are started side by side, in one lab, and take turns block by block. TREE is a checkout of an earlier commit, as
``git worktree add`` makes it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpistrat.text import format_bytes, format_seconds, format_table
from tests.benchmarks.contest import Contender, Contest
from tests.benchmarks.messages import KIB, MIB
from tests.hosts.lab import Lab

# hosts, ranks, rate of the links
PLACES = ((1, 2, "unlimited"), (1, 4, "unlimited"), (2, 4, "1gbit"), (4, 8, "1gbit"))
SIZES, NESTS = (8, 128, KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB), (10, 161)
_PROGRAM = Path(__file__).parent / "peers" / "check_ranks.py"
Launches = list[tuple[list[float], list[float]]]
"""The times of two programs, block by block, in each launch."""


def compare(tree: Path, launches: int, seconds: float) -> list[list[str]]:
    """Return a row for each place and task: the medians of the other tree and of this one, and their difference."""
    rows = []
    for hosts, ranks, rate in PLACES:
        tasks = [("seconds_of_a_call", {"nbytes": nbytes}) for nbytes in SIZES]
        tasks += [("seconds_of_a_nest", {"leaves": leaves}) for leaves in NESTS]
        with Lab(hosts, rate) as lab:
            found = side_by_side(lab, ranks, tree, tasks, seconds, launches)
        for (_, request), times in zip(tasks, found, strict=True):
            now, then = ([second for launch in times for second in launch[index]] for index in (0, 1))
            lower, middle, upper = statistics.quantiles([new / old - 1 for new, old in zip(now, then, strict=True)], n=4)
            medians = [format_seconds(statistics.median(some)) for some in (then, now)]
            what = format_bytes(request["nbytes"]) if "nbytes" in request else f"dict of {request['leaves']}"
            rows.append([f"{hosts}x{ranks // hosts}", what, *medians, f"{middle:+.1%}", f"{lower:+.1%} to {upper:+.1%}"])
            print(*rows[-1], sep="  ", flush=True)
    return rows


def side_by_side(
    lab: Lab,
    ranks: int,
    tree: Path,
    tasks: Sequence[tuple[str, dict[str, int]]],
    seconds: float,
    launches: int,
) -> list[Launches]:
    """Return, for each task, the times of this tree and another one, that take turns in a lab."""
    contenders = [
        Contender(name, "openmpi", [sys.executable, str(_PROGRAM)], {"PYTHONPATH": str(root)})
        for name, root in (("one", Path(__file__).parents[2]), ("other", tree))
    ]
    found: list[Launches] = [[] for _ in tasks]
    for launch in range(launches):
        # which cores the ranks of a job get is luck, and who starts first may have it more often
        with Contest(lab, ranks, "block", contenders[:: -1 if launch % 2 else 1]) as contest:
            for (task, request), times in zip(tasks, found, strict=True):
                times.append(_take_turns(contest, task, seconds, request))
    return found


def _take_turns(contest: Contest, task: str, seconds: float, request: dict[str, int]) -> tuple[list[float], list[float]]:
    """Return the times of both programs; who begins a pair changes."""
    times: dict[str, list[float]] = {"one": [], "other": []}
    begun = time.monotonic()
    while (turns := len(times["one"])) < 3 or (time.monotonic() - begun < seconds and turns < 60):
        for name in times if turns % 2 else reversed(times):
            times[name].append(contest.call(name, task, **request)[0])
    return times["one"], times["other"]


def main() -> int:
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
