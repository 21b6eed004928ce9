"""Programs that compete in one lab, ours and what a user would take instead: all wait, and each is timed in turn, in blocks.

Every rank of every program waits for its next request in a read, which costs no processor time. The time of a repetition is
that of the slowest rank.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.benchmarks.pages import spread
from tests.benchmarks.session import PEERS, Session
from tests.disagreements.ranks import next_line
from tests.hosts.lab import Lab
from tests.processes import kill_session

_ANSWER_SECONDS = 60
_BLOCKS, _MAX_REPEATS = 3, 40
_LONG_SECONDS = 0.5  # what takes longer is repeated once a block, and needs no warming up
_CHECKED_BYTES = 1 << 20  # below, what is sent beside the payload would hide what went round the links


class ContestError(RuntimeError):
    """A program failed, gave a wrong sum, or sent its bytes round the links."""


class SilentError(ContestError):
    """A program beside the first gave no answer in time, and is left out from then on."""


@dataclass(frozen=True)
class Contender:
    """A program that competes."""

    name: str  # as tables call it
    launcher: str  # ``openmpi``, ``mpich`` or ``plain``: who starts its ranks
    argv: Sequence[str]  # the program of a rank
    env: Mapping[str, str] = field(default_factory=dict)  # further environment of the ranks


@dataclass(frozen=True)
class Measured:
    """What one program took for one task."""

    times: list[float]  # of the slowest rank, in each repetition
    # bytes that the hosts sent, over the least that any algorithm must send; 0 where that was not looked at
    sent_share: float
    facts: dict[str, Any]  # what the program says of the task, such as the plan that it chose

    @property
    def seconds(self) -> float:
        """The median of the repetitions."""
        return statistics.median(self.times)

    def __str__(self) -> str:
        return spread(self.times)


class Contest:
    """Programs that are started when this is entered, and ended when it is left."""

    def __init__(self, lab: Lab, num_ranks: int, placement: str, contenders: Iterable[Contender]) -> None:
        self.lab, self.num_ranks, self.placement = lab, num_ranks, placement
        self.missing: dict[str, str] = {}  # who was left out, and why
        self.versions: dict[str, str] = {}  # what the programs say of themselves
        self._contenders = list(contenders)
        self._lines: dict[str, list[Connection]] = {}
        self._processes: dict[str, list[subprocess.Popen[str]]] = {}
        self._stack = contextlib.ExitStack()

    @property
    def names(self) -> list[str]:
        """Who competes, in the order in which they take turns."""
        return list(self._lines)

    def __enter__(self) -> Contest:  # noqa: PYI034 - Self is newer than Python 3.10
        self._path = self.lab.folder / "contest"
        try:
            self._server = self._stack.enter_context(socket.socket(socket.AF_UNIX))
            self._server.bind(str(self._path))
            self._stack.callback(self._path.unlink)
            self._server.listen(self.num_ranks)
            for contender in self._contenders:
                self._start(contender)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def alternate(
        self, entries: Mapping[str, tuple[str, Mapping[str, Any]]], seconds: float, share: float = 1.0
    ) -> dict[str, Measured]:
        """Time tasks of programs, in blocks that take turns."""
        entries = {label: entry for label, entry in entries.items() if entry[0] in self._lines}
        for program in {name for name, _ in entries.values()}:
            with contextlib.suppress(SilentError):
                self._ask(program, {"do": "forget"})
        first: dict[str, dict[str, Any]] = {}
        for label, entry in entries.items():
            with contextlib.suppress(SilentError):
                first[label] = self._prepare(*entry)
        times: dict[str, list[float]] = {label: [] for label in first}
        sent: dict[str, list[float]] = {label: [] for label in first}
        for _ in range(_BLOCKS):
            for label in first:
                with contextlib.suppress(SilentError):
                    some, share_sent = self._block(*entries[label], first[label]["seconds"], seconds, share)
                    times[label] += some
                    sent[label].append(share_sent)
        return {
            label: Measured(times[label], min(sent[label]), first[label]["facts"])
            for label in first
            if entries[label][0] in self._lines
        }

    def call(self, contender: str, function: str, **arguments: Any) -> list[Any]:
        """Call a function of a program on all its ranks; return what each returned."""
        answers = self._ask(contender, {"do": "call", "name": function, "arguments": arguments})
        return [answer["value"] for answer in answers]

    def _prepare(self, name: str, task: Mapping[str, Any]) -> dict[str, Any]:
        """Run until it is warm; return the time of the fastest run on the slowest rank, and what the program says of it."""
        best = math.inf
        for request in ("prepare", "again", "again"):
            answers = self._ask(name, {"do": request, "task": task})
            if not all(answer["right"] for answer in answers):
                raise ContestError(f"{name} gave a wrong result for {task}")
            seconds = max(answer["seconds"] for answer in answers)
            best = min(best, seconds)
            if seconds > _LONG_SECONDS:  # decided here: the clocks of the ranks may differ
                break
        return {"seconds": best, "facts": answers[0]["facts"]}

    def _block(self, name: str, task: Mapping[str, Any], each: float, budget: float, share: float) -> tuple[list[float], float]:
        warm, repeats = (0, 1) if each > _LONG_SECONDS else (2, min(max(int(budget / _BLOCKS / each) - 2, 2), _MAX_REPEATS))
        hosts, nbytes = len(set(self.lab.host_of_each_rank(self.num_ranks, self.placement))), task.get("nbytes", 0)
        counted = hosts > 1 and nbytes >= _CHECKED_BYTES
        before = sum(self.lab.bytes_sent().values()) if counted else 0
        answers = self._ask(name, {"do": "time", "task": task, "warm": warm, "repeats": repeats})
        times = [max(ranks) for ranks in zip(*(answer["seconds"] for answer in answers), strict=True)]
        if not counted:
            return times, 0.0
        # whatever the algorithm: every host but one sends its part of the sum, and every host but one is sent the whole
        least = 2 * (hosts - 1) * nbytes * share * (warm + repeats)
        sent = (sum(self.lab.bytes_sent().values()) - before) / least
        if sent < 1.0:
            raise ContestError(f"{name} sent {sent:.2f} of the bytes that it must for {task}: some went round the links")
        return times, sent

    def _ask(self, name: str, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        if name not in self._lines:
            raise SilentError(self.missing[name])
        for line in self._lines[name]:
            line.send(request)
        if not all(line.poll(_ANSWER_SECONDS) for line in self._lines[name]):
            silence = f"gave no answer to {request} within {_ANSWER_SECONDS} s"
            if name == self._contenders[0].name:
                raise ContestError(f"{name} {silence}\n{self._log(name)}")
            self.missing[name] = silence
            del self._lines[name]
            self._kill(name)
            raise SilentError(f"{name} {silence}")
        answers = [_answer(line) for line in self._lines[name]]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise ContestError(f"{name} failed with {request}: {errors[0]}\n{self._log(name)}")
        return answers

    def _start(self, contender: Contender) -> None:
        fixed = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        env = {**fixed, **contender.env, "CONTEST_SOCKET": str(self._path)}
        self._processes[contender.name] = []
        try:
            with self._log_path(contender.name).open("wb") as log:
                self._processes[contender.name] = _LAUNCHERS[contender.launcher](self, contender.argv, env, log)
            self._lines[contender.name] = self._welcome(contender.name)
        except ContestError as error:
            self.missing[contender.name] = str(error)
            self._kill(contender.name)
            if contender is self._contenders[0]:
                raise

    def _welcome(self, name: str) -> list[Connection]:
        """Wait for all ranks of a program; return the line to each, in their order."""
        lines: dict[int, Connection] = {}
        while len(lines) < self.num_ranks:
            line = next_line(self._server, lambda: any(process.poll() is not None for process in self._processes[name]))
            if line is None:
                raise ContestError(f"it did not start: {self._log(name)}")
            self._stack.enter_context(line)
            hello = line.recv()
            lines[hello["rank"]] = line
            self.versions.update(hello["versions"])
        return [lines[rank] for rank in range(self.num_ranks)]

    def _log_path(self, name: str) -> Path:
        return self.lab.folder / f"contest-{name.replace(' ', '-')}.log"

    def _log(self, name: str) -> str:
        return self._log_path(name).read_text(errors="replace")[-2000:].strip()

    def _kill(self, name: str) -> None:
        for process in self._processes[name]:
            kill_session(process.pid)
            process.wait()

    def _end(self) -> None:
        self._stack.close()
        for name in self._processes:
            self._kill(name)


def _answer(line: Connection) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = line.recv()
    except EOFError:
        return {"error": "it ended"}
    return answer


def _openmpi(contest: Contest, argv: Sequence[str], env: Mapping[str, str], log: Any) -> list[subprocess.Popen[str]]:
    command, variables = contest.lab.mpirun(contest.num_ranks, contest.placement, argv)
    if len(contest.lab.hosts) == 1 and contest.num_ranks == 2:  # they have a core each, and need not give it up to each other
        variables = {**variables, "OMPI_MCA_mpi_yield_when_idle": "0"}
    return [contest.lab.start(contest.lab.hosts[0], command, log, {**variables, **env})]


def _mpich(contest: Contest, argv: Sequence[str], env: Mapping[str, str], log: Any) -> list[subprocess.Popen[str]]:
    lab, hosts = contest.lab, contest.lab.host_of_each_rank(contest.num_ranks, contest.placement)
    # its launcher takes so many ranks for each host, once or again and again
    counts = [(host, len(list(group))) for host, group in itertools.groupby(hosts)]
    if len(counts) > len(set(hosts)) and contest.placement != "cyclic":
        raise ContestError(f"its launcher does not place ranks like {contest.placement}")
    hostfile = lab.folder / "hostfile.mpich"
    hostfile.write_text("".join(f"{host}:{count}\n" for host, count in counts[: len(set(hosts))]))
    options = ["-f", str(hostfile), "-launcher", "ssh", "-launcher-exec", lab.agent, "-iface", "eth0"]
    mpiexec = str(Path(argv[0]).parent / "mpiexec")
    return [lab.start(lab.hosts[0], [mpiexec, *options, "-n", str(contest.num_ranks), *argv], log, env)]


def _plain(contest: Contest, argv: Sequence[str], env: Mapping[str, str], log: Any) -> list[subprocess.Popen[str]]:
    hosts = contest.lab.host_of_each_rank(contest.num_ranks, contest.placement)
    shared = {**env, "CONTEST_HOSTS": ",".join(hosts)}
    return [contest.lab.start(host, argv, log, {**shared, "CONTEST_RANK": str(rank)}) for rank, host in enumerate(hosts)]


_LAUNCHERS = {"openmpi": _openmpi, "mpich": _mpich, "plain": _plain}


OURS, WRAPPED = "mpistrat", "mpi4py, wrapped"
# Who competes where nothing else is said.
NAMES = (OURS, "Open MPI", "Open MPI, no HAN", "MPICH", "gloo", "TensorFlow")
_ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def competing(
    session: Session, lab: Lab, ranks: int, placement: str = "block", names: tuple[str, ...] = (OURS,), **env: str
) -> Iterator[Contest]:
    """Give the programs of those names, in a lab; the session learns their versions, and who could not compete."""
    with Contest(lab, ranks, placement, _contenders(session, names, env)) as contest:
        session.versions.update(contest.versions)
        yield contest
        left_out = {f"{name} on {len(lab.hosts)} hosts {placement}": why for name, why in contest.missing.items()}
        session.environments.missing.update(left_out)


def all_reduces(nbytes: int, kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return what `Contest.alternate` is told of our all-reduces of so many bytes, with options of several kinds."""
    return {name: (OURS, {"kind": "all_reduce", "nbytes": nbytes, "options": fields}) for name, fields in kinds.items()}


def _contenders(session: Session, names: tuple[str, ...], env: dict[str, str]) -> Iterator[Contender]:
    """Return those that are installed, or could be."""
    for name in names:
        launcher, environment, program, variables = KINDS[name]
        python = session.environments.python(environment) if environment else sys.executable
        if python:
            own = variables | (env if launcher == "openmpi" else {})
            yield Contender(name, launcher, [python, str(PEERS / program)], own)


# In the order of tables: who starts the ranks, the environment that they need, their program, and further variables of theirs.
KINDS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    OURS: ("openmpi", "", "ours.py", {"PYTHONPATH": str(_ROOT)}),
    WRAPPED: ("openmpi", "", "wrapped_ranks.py", {"PYTHONPATH": str(_ROOT)}),
    "Open MPI": ("openmpi", "", "mpi_ranks.py", {}),
    "Open MPI, no HAN": ("openmpi", "", "mpi_ranks.py", {"OMPI_MCA_coll": "^han"}),
    "MPICH": ("mpich", "mpich", "mpi_ranks.py", {}),
    "gloo": ("plain", "torch", "gloo_ranks.py", {}),
    "TensorFlow": ("plain", "tensorflow", "tf_ranks.py", {}),
}
