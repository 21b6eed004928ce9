"""Run cases of disagreement, and say how each ended: see the package."""

import argparse
import collections
import dataclasses
import fnmatch
import signal
import sys
from collections.abc import Sequence

from tests.disagreements.case import Plan
from tests.disagreements.job import run_cases
from tests.disagreements.kinds import KINDS, SHAPES, all_plans, drawn_plans, quick_plans
from tests.disagreements.ranks import Place
from tests.disagreements.verdicts import CLASSES


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; return 1 where a case did not end as it must."""
    arguments = _parser().parse_args(argv)
    if arguments.list:
        for kind in KINDS.values():
            print(f"{kind.name:40} {', '.join(sorted(kind.outcomes)) if kind.sizes else 'drawn from a seed'}")
        return 0
    settings = dict(pair.split("=", 1) for pair in arguments.set)
    counts: collections.Counter[str] = collections.Counter()
    wrong = 0
    # what ends this must end the ranks first
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    for shape in arguments.shape or SHAPES:
        for done in run_cases(shape, _plans(arguments, Place(shape).size), settings):
            counts[done.verdict.name] += 1
            wrong += not done.is_allowed
            print(done, flush=True)
    print(", ".join(f"{name} {counts[name]}" for name in CLASSES if counts[name]), f"- not as they must be: {wrong}")
    return 1 if wrong else 0


def _plans(arguments: argparse.Namespace, ranks: int) -> list[Plan]:
    if arguments.drawn:
        name = arguments.kind[0] if arguments.kind else "drawn_program"
        return list(drawn_plans(name, ranks, arguments.drawn, 300_000, arguments.seed))
    names = [name for name in KINDS if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.kind or ["*"])]
    if not names:
        raise SystemExit(f"no kind is called {' or '.join(arguments.kind)}; see --list")
    plans = quick_plans(ranks, names) if arguments.quick else list(all_plans(ranks, names))
    return [
        plan if arguments.odd is None else dataclasses.replace(plan, odd=tuple(arguments.odd))
        for plan in plans
        if (not arguments.size or plan.count in arguments.size)
        and not (arguments.warm and not plan.warm)
        and not (arguments.first and plan.warm)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.disagreements", description="Run programs in which ranks disagree.")
    parser.add_argument("--list", action="store_true", help="list the kinds, and how their cases may end")
    parser.add_argument("--shape", action="append", help=f"2x2, 3+1, hosts:2+2; again for more (default: {' '.join(SHAPES)})")
    parser.add_argument("--kind", action="append", help="a kind, or a pattern such as 'dtype_*'; again for more")
    parser.add_argument("--size", action="append", type=int, help="elements; again for more")
    parser.add_argument("--warm", action="store_true", help="only with the same calls before")
    parser.add_argument("--first", action="store_true", help="only without")
    parser.add_argument("--odd", action="append", type=int, help="an odd rank; again for more (default: by the case)")
    parser.add_argument("--quick", action="store_true", help="one or two cases of each kind")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="N cases of --kind drawn_program or drawn_pair")
    parser.add_argument("--seed", type=int, default=1, help="of the first case that is drawn")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable for the ranks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
