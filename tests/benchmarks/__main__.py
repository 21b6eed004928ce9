"""Run experiments and write their tables: ``python -m tests.benchmarks EXPERIMENT [--out DIR] [--quick] [--peers DIR]``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.experiments import EXPERIMENTS
from tests.benchmarks.pages import RESULTS, markdown, write_table
from tests.benchmarks.session import CACHE, Session
from tests.hosts import lab


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; return 0, or 1 where an experiment failed: the others run all the same."""
    arguments = _parser().parse_args(argv)
    reason = lab.missing()
    if reason:
        print(f"benchmarks: {reason}", file=sys.stderr)
        return 2
    names = list(EXPERIMENTS) if arguments.experiment == "all" else [arguments.experiment]
    return max(_run(name, arguments) for name in names)


def _run(name: str, arguments: argparse.Namespace) -> int:
    session = Session(name, arguments.quick, arguments.peers, arguments.only)
    try:
        tables = EXPERIMENTS[name](session)
    except Exception as error:
        session.say(f"failed: {error}")
        if arguments.experiment != "all":
            raise
        return 1
    print(session.circumstances(), flush=True)
    out = arguments.out or (None if arguments.quick else RESULTS)
    for key, table in tables.items():
        print(f"\n{markdown(table)}", flush=True)
        if out is not None:
            path = out / f"{name}{f'-{key}' * bool(key)}.csv"
            write_table(path, session.circumstances(), table, keep=bool(arguments.only))
            session.say(f"wrote {path}; python -m tests.docs.generate brings the pages up to date")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measure, side by side with others.")
    add = parser.add_argument
    add("experiment", choices=(*EXPERIMENTS, "all"))
    add("--out", type=Path, metavar="DIR", help="where tables go (default: docs/benchmarks/results; with --quick: none)")
    part = "of safety a shape (2x2), of large_messages a placement (4x8-block): measure that, keep the rest; again for more"
    add("--only", action="append", default=[], metavar="PART", help=part)
    add("--quick", action="store_true", help="a small part of it, in seconds: to try an experiment out")
    add("--peers", type=Path, default=CACHE, metavar="DIR", help=f"where peers are installed (default: {CACHE})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
