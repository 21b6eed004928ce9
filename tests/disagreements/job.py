"""Job: ranks that run one case after the other, as they are told, and are ended where they stand still."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.disagreements.case import Plan
from tests.disagreements.deviations import REPORTED
from tests.disagreements.kinds import Kind, kind_of
from tests.disagreements.memory import changed
from tests.disagreements.ranks import Place, Ranks, default_environment
from tests.disagreements.verdicts import Evidence, Verdict, is_reported, judge
from tests.processes import patient

PATIENCE_SECONDS = 10.0  # without a word from any rank: then the job stands still; more on a busy machine
STALL_SECONDS = 3  # as MPISTRAT_STALL_SECONDS
_CASES_OF_A_JOB = 60  # a case that was told leaves its communicators and windows behind


@dataclass(frozen=True)
class Done:
    shape: str  # where
    plan: Plan  # which case
    kind: Kind  # what its ranks call
    verdict: Verdict  # how it ended
    seconds: float  # how long it took

    @property
    def is_allowed(self) -> bool:
        """Whether a case of this kind may end like that."""
        return self.verdict.name in self.kind.outcomes

    def __str__(self) -> str:
        flag, name, seconds = "  " if self.is_allowed else "! ", self.verdict.name, f"{self.seconds:.1f} s"
        late = f"({self.verdict.further} further calls) " if self.verdict.further else ""
        return f"{flag}{name:8} {self.shape} {self.plan} {late}{seconds} [{self.kind.difference}]: {self.verdict.text}"


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
            kind = kind_of(plan, place.size)
            for attempt in range(2):
                fresh = job is None
                job = job or _Job(place, environment, patience)
                evidence = job.run(plan, kind)
                if evidence.is_begun or fresh or attempt:
                    break
                job = job.end()  # what the case before left may be the reason: once more, with new ranks
            verdict = judge(evidence, kind.says, plan.odd[0], kind.alone, "right" in kind.outcomes, kind.place)
            if not evidence.is_begun:
                verdict = Verdict(verdict.name, f"before the disagreement: {verdict.text}")
            yield Done(shape, plan, kind, verdict, time.monotonic() - begun)
            # making a strategy is a collective call: where ranks are told in it, some may have left messages of MPI
            is_left = verdict.name == "told" and any(call.verb in ("strategy", "mirrored") for call in kind.usual + kind.odd)
            if is_left or not job.goes_on(verdict.name):
                job = job.end()
    finally:
        if job is not None:
            job.end()
        place.close()


class _Job(Ranks):
    def __init__(self, place: Place, environment: Mapping[str, str], patience: float) -> None:
        super().__init__(place, "tests.disagreements.rank", environment)
        self._patience, self._cases = patience, 0

    def run(self, plan: Plan, kind: Kind) -> Evidence:
        """Run a case until all ranks have said how it ended, the job has ended, or nothing happens any more."""
        self._cases += 1
        evidence = Evidence(self.place.size)
        begun = (self.folder / "output").stat().st_size
        self.ask(do="case", plan=plan)
        deadline = time.monotonic() + patient(self._patience)
        while len(evidence.ended) < self.place.size:
            said = self.receive()
            for words in said:
                evidence.add(words)
            if said:
                deadline = time.monotonic() + patient(self._patience)
            evidence.output = self.output(begun)
            if not self.lines or self.process.poll() is not None:
                break
            # where some have raised, the others are about to be told, in a call of MPI by the end of the job
            ends = evidence.ended or (kind.alone and kind.allowed != REPORTED)  # by itself, which may come after a report
            reported = evidence.is_begun and not ends and is_reported(evidence.output, plan.odd[0], kind.alone, kind.place)
            evidence.still = time.monotonic() > deadline or bool(reported)
            if evidence.still:
                break
        if len(evidence.ended) < self.place.size and not evidence.still:
            self._last_words(evidence)
        self._look(evidence)
        evidence.output = self.output(begun)
        return evidence

    def goes_on(self, name: str) -> bool:
        """Say how the last case ended, and return whether these ranks can run another one."""
        if name not in ("right", "told") or len(self.lines) < self.place.size or self._cases >= _CASES_OF_A_JOB:
            return False
        return len(self._answers("left", do="leave", close=name == "right")) == self.place.size

    def _look(self, evidence: Evidence) -> None:
        """Find what was changed that nobody may change: from outside, and by the ranks that can still answer."""
        if not evidence.is_begun:
            return
        for rank in range(self.place.size):
            evidence.foreign += [f"rank {rank}: {text}" for text in changed(self.folder / f"memory.{rank}")]
        if len(evidence.ended) == self.place.size and len(self.lines) == self.place.size:
            for words in self._answers("foreign", do="look"):
                evidence.foreign += [f"rank {words['rank']}: {text}" for text in words["foreign"]]

    def _last_words(self, evidence: Evidence) -> None:
        """Wait for the end of a job that has begun to end."""
        deadline = time.monotonic() + patient(self._patience)
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.process.poll() is None:
            evidence.still = True
        else:
            evidence.exit_code = self.process.returncode
            time.sleep(0.1)

    def _answers(self, key: str, **request: Any) -> list[dict[str, Any]]:
        """Ask all ranks, and return what those said that answered in time."""
        self.ask(**request)
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + patient(self._patience)
        while len(found) < self.place.size and time.monotonic() < deadline and len(self.lines) == self.place.size:
            found += [words for words in self.receive() if key in words]
        return found
