"""Job: ranks that run one case after the other, as they are told, and are ended where they stand still."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.disagreements.case import Plan
from tests.disagreements.kinds import KINDS
from tests.disagreements.memory import changed
from tests.disagreements.places import Place, default_environment, rank_program
from tests.disagreements.verdicts import Evidence, Verdict, judge, missing_in_report
from tests.processes import patient

PATIENCE_SECONDS = 10.0  # without a word from any rank: then the job stands still; more on a busy machine
STALL_SECONDS = 3  # as MPISTRAT_STALL_SECONDS
_START_SECONDS = 120.0
_CASES_OF_A_JOB = 60  # a case that was told leaves its communicators and windows behind


class JobError(RuntimeError):
    """The ranks could not be started."""


@dataclass(frozen=True)
class Done:
    """A case that was run."""

    shape: str  # where
    plan: Plan  # which case
    verdict: Verdict  # how it ended
    note: str  # what the case says of itself
    seconds: float  # how long it took

    @property
    def is_allowed(self) -> bool:
        """Whether a case of this kind may end like that."""
        return self.verdict.name in KINDS[self.plan.kind].allowed

    def __str__(self) -> str:
        flag = "  " if self.is_allowed else "! "
        note = f" [{self.note}]" if self.note else ""
        late = f" ({self.verdict.further} further calls)" if self.verdict.further else ""
        return f"{flag}{self.verdict.name:8} {self.shape} {self.plan}{late} {self.seconds:.1f} s{note}: {self.verdict.text}"


def run_cases(
    shape: str, plans: Iterable[Plan], settings: Mapping[str, str] | None = None, patience: float = PATIENCE_SECONDS
) -> Iterator[Done]:
    """Run cases in as few jobs as may be; yield how each ended."""
    place = Place(shape)
    environment = default_environment({"MPISTRAT_STALL_SECONDS": str(STALL_SECONDS), **(settings or {})})
    job: _Job | None = None
    try:
        for plan in plans:
            begun = time.monotonic()
            for attempt in range(2):
                fresh = job is None
                job = job or _Job(place, environment, patience)
                evidence = job.run(plan)
                if evidence.is_begun or fresh or attempt:
                    break
                job = job.end()  # what the case before left may be the reason: once more, with new ranks
            found = KINDS[plan.kind]
            verdict = judge(evidence, found.says, plan.odd, found.alone)
            if not evidence.is_begun:
                verdict = Verdict(verdict.name, f"before the disagreement: {verdict.text}")
            yield Done(shape, plan, verdict, evidence.note, time.monotonic() - begun)
            if not job.goes_on(verdict.name):
                job = job.end()
    finally:
        if job is not None:
            job.end()
        place.close()


class _Job:
    def __init__(self, place: Place, environment: Mapping[str, str], patience: float) -> None:
        self._place, self._patience, self._cases = place, patience, 0
        self._folder = TemporaryDirectory(prefix="disagree-", ignore_cleanup_errors=True)
        self._path = Path(self._folder.name)
        self._streams: dict[int, _Stream] = {}
        self._selector = selectors.DefaultSelector()
        with socket.socket(socket.AF_UNIX) as server, (self._path / "output").open("wb") as output:
            server.bind(str(self._path / "socket"))
            server.listen(place.size)
            started = rank_program("tests.disagreements.rank")
            self._process = place.start(started, {**environment, "DISAGREEMENTS_FOLDER": str(self._path)}, output)
            self._meet(server)

    def run(self, plan: Plan) -> Evidence:
        """Run a case until all ranks have said how it ended, the job has ended, or nothing happens any more."""
        self._cases += 1
        evidence = Evidence(self._place.size)
        begun = (self._path / "output").stat().st_size
        self._ask(do="case", plan=asdict(plan))
        deadline = time.monotonic() + patient(self._patience)
        while len(evidence.ended) < self._place.size:
            lines = list(self._receive(0.25))
            for line in lines:
                _note(line, evidence)
            if lines:
                deadline = time.monotonic() + patient(self._patience)
            evidence.output = self._output(begun)
            if not self._streams or self._process.poll() is not None:
                break
            # where some have raised, the others are about to be told, in a call of MPI by the end of the job
            reported = evidence.is_begun and not evidence.ended and missing_in_report(evidence.output, plan.odd)
            evidence.still = time.monotonic() > deadline or bool(reported and not KINDS[plan.kind].alone)
            if evidence.still:
                break
        if len(evidence.ended) < self._place.size and not evidence.still:
            self._last_words(evidence)
        self._look(evidence)
        evidence.output = self._output(begun)
        return evidence

    def goes_on(self, name: str) -> bool:
        """Say how the last case ended, and return whether these ranks can run another one."""
        if name not in ("right", "told") or len(self._streams) < self._place.size or self._cases >= _CASES_OF_A_JOB:
            return False
        self._ask(do="leave", close=name == "right")
        return self._await("left")

    def end(self) -> None:
        """End the ranks."""
        self._place.end(self._process)
        for stream in self._streams.values():
            stream.close()
        self._selector.close()
        self._folder.cleanup()

    def _look(self, evidence: Evidence) -> None:
        """Find what was changed that nobody may change: from outside, and by the ranks that can still answer."""
        if not evidence.is_begun:
            return
        for rank in range(self._place.size):
            evidence.foreign += [f"rank {rank}: {text}" for text in changed(self._path / f"memory.{rank}")]
        if len(evidence.ended) == self._place.size and len(self._streams) == self._place.size:
            self._ask(do="look")
            found: list[dict[str, Any]] = []
            self._await("foreign", found)
            evidence.foreign += [f"rank {line['rank']}: {text}" for line in found for text in line["foreign"]]

    def _last_words(self, evidence: Evidence) -> None:
        """Wait for the end of a job that has begun to end."""
        deadline = time.monotonic() + patient(self._patience)
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._process.poll() is None:
            evidence.still = True
        else:
            evidence.exit_code = self._process.returncode
            time.sleep(0.1)

    def _await(self, key: str, found: list[dict[str, Any]] | None = None) -> bool:
        """Wait for a line with a key from each rank; return whether all said it in time."""
        said: list[dict[str, Any]] = [] if found is None else found
        deadline = time.monotonic() + patient(self._patience)
        while len(said) < self._place.size and time.monotonic() < deadline and len(self._streams) == self._place.size:
            said += [line for line in self._receive(0.25) if key in line]
        return len(said) == self._place.size

    def _ask(self, **request: Any) -> None:
        text = (json.dumps(request) + "\n").encode()
        for rank, stream in list(self._streams.items()):
            if not stream.send(text):
                self._drop(rank)

    def _receive(self, seconds: float) -> Iterator[dict[str, Any]]:
        for key, _ in self._selector.select(seconds):
            stream: _Stream = key.data
            lines = stream.lines()
            if lines is None:
                self._drop(stream.rank)
            else:
                yield from lines

    def _drop(self, rank: int) -> None:
        stream = self._streams.pop(rank)
        self._selector.unregister(stream.connection)
        stream.close()

    def _output(self, begun: int) -> str:
        with (self._path / "output").open("rb") as output:
            output.seek(begun)
            return output.read().decode(errors="replace")

    def _meet(self, server: socket.socket) -> None:
        """Wait until all ranks have connected."""
        deadline = time.monotonic() + _START_SECONDS
        server.settimeout(0.5)
        while len(self._streams) < self._place.size:
            try:
                stream = _Stream(server.accept()[0])
            except TimeoutError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    output = self._output(0)
                    self.end()
                    raise JobError(f"the ranks did not start: {output[-3000:]}") from None
                continue
            self._streams[stream.rank] = stream
            self._selector.register(stream.connection, selectors.EVENT_READ, stream)


def _note(line: dict[str, Any], evidence: Evidence) -> None:
    """Add what a rank said."""
    rank = line["rank"]
    evidence.is_begun |= line.get("at") == "disagreement"
    evidence.note = line.get("note") or evidence.note
    if "values" in line:
        evidence.values[rank] = line["values"]
    if "ended" in line:
        evidence.ended[rank] = line["ended"]
        evidence.values[rank] = line["ended"]["values"]


class _Stream:
    """The connection to a rank, which has said who it is."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._rest = connection, b""
        connection.settimeout(5)
        while b"\n" not in self._rest:
            self._rest += connection.recv(1 << 16)
        line, _, self._rest = self._rest.partition(b"\n")
        self.rank = int(json.loads(line)["rank"])

    def lines(self) -> list[dict[str, Any]] | None:
        """Return what has arrived, or None where the rank is gone."""
        try:
            arrived = self.connection.recv(1 << 20)
        except OSError:
            return None
        if not arrived:
            return None
        *whole, self._rest = (self._rest + arrived).split(b"\n")
        return [json.loads(line) for line in whole]

    def send(self, text: bytes) -> bool:
        """Send a line; return whether the rank is there."""
        try:
            self.connection.sendall(text)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
