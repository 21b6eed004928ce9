"""Play random cases in jobs of several shapes, and say which ended wrong: see the package."""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpistrat.execution.select import TRANSPORTS
from mpistrat.settings import INTER_TRANSPORT, INTRA_TRANSPORT
from tests.disagreements.ranks import Place, Ranks, default_environment
from tests.processes import patient

SHAPES = ("1x1", "1x2", "1x3", "2x1", "2x2", "3+1", "1x4", "2x2:cyclic")
_CASES_OF_A_JOB = 100
_PATIENCE_SECONDS = 25.0  # without a case done on any rank; more on a busy machine

_CHOICES: dict[str, Sequence[str]] = {
    "MPISTRAT_MAX_MESSAGE_BYTES": ("", "", "500", "1000", "4KiB", "64KiB"),  # Open MPI polls all messages that are under way
    "MPISTRAT_CHUNK_BYTES": ("", "", "64", "1000", "4KiB", "64KiB", "1MiB"),
    "MPISTRAT_ALGORITHM": ("", "", "flat", "hierarchical"),
    **{
        setting.name: ("", "", *(name for name in setting.choices if name in TRANSPORTS))
        for setting in (INTRA_TRANSPORT, INTER_TRANSPORT)
    },
    "MPISTRAT_PEER_MEMORY": ("", "0"),
    "MPISTRAT_STRICT": ("", "", "1"),
    "MPISTRAT_TIMEOUT_SECONDS": ("", "", "", "120"),
    "FUZZ_RAISES": ("", "", "1"),
}


@dataclass(frozen=True)
class Failure:
    command: str  # repeats it, after the cases of its job
    text: str  # what was wrong, on which rank


def draw_settings(seed: int, first: int, num_ranks: int) -> dict[str, str]:
    """Return the settings of the job that begins with a case."""
    rng = random.Random(f"{seed} {first}")
    drawn = {name: rng.choice(values) for name, values in _CHOICES.items()}
    if num_ranks == 1:
        drawn["MPISTRAT_ALGORITHM"] = ""  # not every one is for one rank
    return {name: value for name, value in drawn.items() if value}


def play(shape: str, seed: int, cases: int, first: int = 0, settings: dict[str, str] | None = None) -> Iterator[Failure]:
    """Play so many cases in a shape, a job after the other; yield what ended wrong."""
    place, number, end = Place(shape), first, first + cases
    begun = first
    while number < end:
        chosen = draw_settings(seed, begun, place.size) if settings is None else settings
        stop = min(end, begun + _CASES_OF_A_JOB)
        reached, failures = _run_job(place, seed, number, stop, chosen)
        variables = " ".join(f"--set {name}={value}" for name, value in chosen.items())
        for case, text in sorted(failures.items()):
            which = f"--shape {shape} --seed {seed} --first {number} --cases {case - number + 1}"
            yield Failure(f"python -m tests.fuzz {which} {variables}", text)
        number = reached
        if number >= stop:
            begun = number = stop


def _run_job(place: Place, seed: int, first: int, stop: int, settings: dict[str, str]) -> tuple[int, dict[int, str]]:
    """Run a job; return the case to go on with, and what the ranks say of each case that failed."""
    usual = {"MPISTRAT_TUNING": "off", "MPISTRAT_DEVICE": "cpu", "MPISTRAT_STALL_SECONDS": "8"}
    ranks = Ranks(place, "tests.fuzz.rank", default_environment({**usual, **settings}))
    try:
        ranks.ask(seed=seed, first=first, stop=stop)
        where: dict[int, int] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + patient(2 * _PATIENCE_SECONDS)
        while (ranks.lines or ranks.process.poll() is None) and time.monotonic() < deadline:
            for words in ranks.receive():
                where[words["rank"]], deadline = words["at"], time.monotonic() + patient(_PATIENCE_SECONDS)
                if "failed" in words:
                    failures[words["at"]] = f"{failures.get(words['at'], '')}rank {words['rank']}: {words['failed']}\n"
        code, last = ranks.process.poll(), max(where.values(), default=first)
        if code is None or (code and last not in failures):
            failures[min(last, stop - 1)] = f"{'HANG' if code is None else f'EXIT {code}'} {where}\n{ranks.output()[-6000:]}"
        return (stop if code == 0 else last + 1), failures
    finally:
        ranks.end()


def main(argv: Sequence[str] | None = None) -> int:
    """Play what was asked for; return 1 if something ended wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random legal programs against NumPy.")
    parser.add_argument("--shape", action="append", help=f"2x2, 3+1; again for more (default: {' '.join(SHAPES)})")
    parser.add_argument("--cases", type=int, default=200, help="in each shape (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first case (default: 0)")
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="settings of all jobs, instead of random ones")
    parser.add_argument("--default-settings", action="store_true", help="no settings instead of random ones")
    arguments = parser.parse_args(argv)
    settings = dict(pair.split("=", 1) for pair in arguments.set or ())
    count = 0
    for shape in arguments.shape or SHAPES:
        begun = time.monotonic()
        fixed = settings if settings or arguments.default_settings else None
        for failure in play(shape, arguments.seed, arguments.cases, arguments.first, fixed):
            count += 1
            print(f"--- {failure.command}\n{failure.text}", flush=True)
        print(f"{shape}: {arguments.cases} cases in {time.monotonic() - begun:.0f} s, {count} failures so far", flush=True)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
