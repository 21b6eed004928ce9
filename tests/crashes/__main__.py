"""Stop saves, and say what was found after that: see the package."""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.crashes import kills, saves
from tests.disagreements.places import Place, default_environment
from tests.disagreements.ranks import Ranks
from tests.processes import patient

_PATIENCE_SECONDS = 60.0  # without a word of any rank; more on a busy machine


def main(argv: Sequence[str] | None = None) -> int:
    """Do what was asked for; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.crashes", description="Saves that are stopped at every point.")
    parser.add_argument("does", choices=["points", "errors", "kills"])
    parser.add_argument("--shape", action="append", help="2x2, 3+1; again for more (default: 1x1 1x2 2x1 2x2 3+1)")
    parser.add_argument("--jobs", type=int, default=100, help="of kills, in these shapes by turns (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants of kills")
    arguments = parser.parse_args(argv)
    logging.getLogger("mpistrat").setLevel(logging.ERROR)  # without a line for each save
    shapes = arguments.shape or ["1x1", "1x2", "2x1", "2x2", "3+1"]
    wrong = 0
    if arguments.does == "kills":
        counts: collections.Counter[str] = collections.Counter()
        for restored, text in kills.run(shapes, arguments.jobs, arguments.seed):
            counts[restored] += 1
            print(f"{dict(counts)} {text}", flush=True)
        return 1 if counts["wrong"] else 0
    for shape in shapes:
        begun = time.monotonic()
        said, texts = (_points if arguments.does == "points" else _errors)(shape)
        for text in texts[:20]:
            print(f"--- {shape} {text}", flush=True)
        wrong += len(texts)
        print(f"{shape}: {said} in {time.monotonic() - begun:.0f} s, wrong: {len(texts)}", flush=True)
    return 1 if wrong else 0


def _points(shape: str) -> tuple[str, list[str]]:
    [words, *_] = [words for words in _said(shape, "points") if "found" in words]
    num_cuts, num_states, wrong = words["found"]
    return f"{saves.NUM_SAVES} saves, calls {words['calls']}, {num_cuts} moments, {num_states} contents of the disk", wrong


def _errors(shape: str) -> tuple[str, list[str]]:
    found = [(words["rank"], words["failed"]) for words in _said(shape, "errors") if "failed" in words]
    failures = sum(rank == 0 and not text for rank, text in found)
    return f"{failures} calls failed", [f"rank {rank}: {text}" for rank, text in found if text]


def _said(shape: str, does: str) -> Iterator[dict[str, Any]]:
    """Run a job, and yield what its ranks say."""
    usual = {"MPISTRAT_TUNING": "off", "MPISTRAT_DEVICE": "cpu"}
    ranks = Ranks(Place(shape), "tests.crashes.rank", default_environment(usual))
    try:
        ranks.ask(does=does, shape=shape)
        deadline = time.monotonic() + patient(_PATIENCE_SECONDS)
        while (ranks.lines or ranks.process.poll() is None) and time.monotonic() < deadline:
            for words in ranks.receive():
                deadline = time.monotonic() + patient(_PATIENCE_SECONDS)
                yield words
        if code := ranks.process.poll() is None or ranks.process.returncode:
            raise RuntimeError(f"the job of {shape} ended with {code}: {ranks.output()[-6000:]}")
    finally:
        ranks.end()


if __name__ == "__main__":
    sys.exit(main())
