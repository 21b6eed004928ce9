"""Twelve ways in which a rank does not come, as a user's program has them, and what the stall report must say of each."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.disagreements.ranks import Place, default_environment
from tests.disagreements.verdicts import missing_in_report, ranks_named

ODD = 1  # the rank that does not come
_NAME = "job.py"
_LIMIT_SECONDS = 60.0  # for one that is not reported at all
_SLEEP = "time.sleep(3600)"

_PROLOGUE = """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
is_odd = strategy.extended.communicator.rank == 1


def step(count=10):
    return mpistrat.get_replica_context().all_reduce("sum", np.ones(count))


strategy.run(step)
strategy.run(step, args=(300_000,))
"""


@dataclass(frozen=True)
class Hang:
    """A program in which the others wait for one rank."""

    text: str  # what comes after the first steps; the report must name one of the lines that end with ``# here``
    any_line: bool = False  # whether any line of the program will do: the rank cannot say any more where it is
    or_told: bool = False  # whether the calls can be compared: then an AgreementError that names the rank is as good

    @property
    def program(self) -> str:
        return _PROLOGUE + textwrap.dedent(self.text)

    @property
    def lines(self) -> set[str]:
        """The lines that the report may name."""
        return set(_lines_here(self.program, self.any_line))


def _lines_here(program: str, any_line: bool = False) -> list[str]:
    lines = enumerate(program.splitlines(), 1)
    return [f"{_NAME}:{number}" for number, line in lines if line.endswith("# here") or any_line]


def _instead(text: str, **how: Any) -> Hang:
    return Hang(f"if is_odd:\n{textwrap.indent(textwrap.dedent(text).strip(), '    ')}\nstrategy.run(step)\n", **how)


HANGS: dict[str, Hang] = {
    "computes": _instead("total = 0\nwhile True:  # here\n    total += 1  # here"),
    "sleeps in C": _instead("time.sleep(3600)  # here"),
    "reads a pipe": _instead("os.read(os.pipe()[0], 1)  # here"),
    "stopped": _instead("os.kill(os.getpid(), signal.SIGSTOP)  # here", any_line=True),
    "in a lock": _instead("lock = threading.Lock()\nlock.acquire()\nlock.acquire()  # here"),
    "in a second strategy": Hang(
        """
        second = mpistrat.MultiWorkerMirroredStrategy()
        if is_odd:
            second.run(lambda: mpistrat.get_replica_context().all_reduce("sum", np.ones(3)))  # here
        strategy.run(step)
        """
    ),
    "in MPI's own barrier": _instead("MPI.COMM_WORLD.Barrier()  # here"),
    "ended": _instead("sys.exit(0)  # here", any_line=True),
    "makes a variable": _instead("with strategy.scope():\n    mpistrat.Variable(np.ones(10))  # here", or_told=True),
    "makes a strategy": _instead("mpistrat.MultiWorkerMirroredStrategy()  # here", or_told=True),
    "closes": _instead("strategy.close()  # here\nsys.exit(0)  # here", or_told=True),
    "in a data generator": Hang(
        """
        def batches():
            yield np.ones(2)
            if is_odd:
                time.sleep(3600)  # here
            while True:
                yield np.ones(2)


        for batch in strategy.distribute_datasets_from_function(lambda context: batches()):  # here
            strategy.run(step)
        """
    ),
}


def _waiting(text: str) -> Hang:
    return Hang(f"if is_odd:\n    {_SLEEP}  # here\n{textwrap.dedent(text)}\n")


# What the others can be in while a rank sleeps.
WAITS: dict[str, Hang] = {
    "large all_reduce": _waiting("strategy.run(step, args=(300_000,))"),
    "first all_reduce of a shape": _waiting("strategy.run(step, args=(70_000,))"),
    "all_gather": _waiting("strategy.run(lambda: mpistrat.get_replica_context().all_gather(np.ones(3), 0))"),
    "barrier": _waiting("strategy.run(lambda: mpistrat.get_replica_context().barrier())"),
    "strategy.reduce": _waiting("strategy.reduce('sum', strategy.run(lambda: np.ones(2)), axis=None)"),
    "wait of a started all_reduce": _waiting(
        """
        def started():
            mpistrat.get_replica_context().start_all_reduce("sum", np.ones(300_000)).wait()

        strategy.run(started)
        """
    ),
    "making a variable": _waiting("with strategy.scope():\n    mpistrat.Variable(np.ones(10))"),
    "making a strategy": _waiting("mpistrat.MultiWorkerMirroredStrategy()"),
    "making a Communicator of some ranks": Hang(
        """
        pair = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank < 2)
        if is_odd:
            time.sleep(3600)  # here
        mpistrat.Communicator(pair)
        """
    ),
    "close": _waiting("strategy.close()"),
}


@dataclass(frozen=True)
class Found:
    """What was found on stderr of a job."""

    line: str  # which line the report named; empty where it did not name one that it may
    told: bool  # whether the ranks were told that their calls differ
    seconds: float  # that it has taken
    output: str  # all of it

    def is_right(self, hang: Hang) -> bool:
        return bool(self.line) or (self.told and hang.or_told)


def find_report(place: Place, hang: Hang, settings: Mapping[str, str] | None = None, until: str = "") -> Found:
    """Run a program, and return what it reports of the rank that does not come; then end it."""
    with _running(place, lambda folder: hang.program, settings) as (process, said):
        return _await(process, said, hang.lines, until)


def find_reports(place: Place, waits: Iterable[Hang]) -> list[Found]:
    """Run some of WAITS in one program, and return what it reports in each, after which the rank comes, up to a wrong one."""
    texts = [hang.program.removeprefix(_PROLOGUE) for hang in waits]

    def program(folder: Path) -> str:
        come = [f"while not os.path.exists('{folder}/{number}'): time.sleep(0.01)" for number in range(len(texts))]
        return _PROLOGUE + "".join(text.replace(_SLEEP, wait) for text, wait in zip(texts, come, strict=True))

    found, begun = list[Found](), 0
    with _running(place, program) as (process, said):
        for number, line in enumerate(_lines_here(said.with_name(_NAME).read_text())):
            found.append(_await(process, said, {line}, begun=begun))
            if not found[-1].line:
                break
            begun += len(found[-1].output)
            said.with_name(str(number)).touch()
    return found


@contextmanager
def _running(
    place: Place, program: Callable[[Path], str], settings: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a program, and give its launcher, and the file to which all it prints goes; end it in the end."""
    environment = default_environment({"MPISTRAT_STALL_SECONDS": "1", **(settings or {})})
    with TemporaryDirectory(prefix="disagree-", ignore_cleanup_errors=True) as folder:
        script, said = Path(folder, _NAME), Path(folder, "output")
        script.write_text(program(Path(folder)))
        with place.started([sys.executable, str(script)], environment, said) as process:
            yield process, said


def _await(process: subprocess.Popen[bytes], said: Path, lines: Collection[str], until: str = "", begun: int = 0) -> Found:
    """Wait until one of the lines is reported for the rank that does not come, after so many characters of the output."""
    started = time.monotonic()
    while True:
        ended = process.poll() is not None
        output = said.read_text(errors="replace")[begun:]
        line = next((line for line in missing_in_report(output, ODD) if line in lines), "")
        told = "AgreementError" in output and ODD in ranks_named(output)
        seconds = time.monotonic() - started
        if line or ended or seconds > _LIMIT_SECONDS or (until and until in output):
            return Found(line, told, seconds, output)
        time.sleep(0.1)
