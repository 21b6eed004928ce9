"""mpistrat doctor: show what each rank of a job on this host is doing. It reads flight records and touches no process."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpistrat.errors import InvalidArgumentError
from mpistrat.launch import process
from mpistrat.text import format_count, format_elapsed, format_table, ranks_by, ranks_text
from mpistrat.watch.record import job_folders
from mpistrat.watch.states import Neighbours, RankState, encode
from mpistrat.watch.verdict import judge, waits_for

# a finding must be confirmed by a second look, because ranks go on while their records are read
_AGAIN_SECONDS = 0.3
_MOST_SHOWN = 16
_LONGEST_TEXT = 100  # of a call in the table; --json has it whole
_MOST_ENDED = 5  # in the list of jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what each rank of a job on this host is doing, which rank waits for which, and whether that is a deadlock. The "
        "job may be running, or have ended with an error."
    )
    job = "the job: its name, or the pid of one of its processes; needed if there are several"
    parser.add_argument("job", nargs="?", default="", metavar="JOB|PID", help=job)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Print what was found; return 0, or 1 where there is no such job."""
    jobs = sorted(_all_jobs(), key=lambda job: not job.is_running)
    chosen = _chosen(jobs, arguments.job)
    if arguments.json:
        print(json.dumps([job.document() for job in chosen], indent=1))
    elif not chosen:
        print("no mpistrat job of this user is running on this host, and no killed one has left a record")
    elif len(chosen) == 1:
        print(_report(chosen[0]))
    else:
        print(_list(chosen))
    return 0 if chosen else 1


def describe(pid: int) -> str:
    """Return what the ranks of this host are doing that a process has started, an mpiexec; empty if none keeps a record."""
    return "\n\n".join(_report(job) for job in _all_jobs() if job.has_process(pid))


def _all_jobs() -> Iterator[JobReport]:
    """Return jobs, first that in which a rank has begun to record last."""
    yield from filter(None, map(examine, job_folders()))


@dataclass(frozen=True)
class JobReport:
    """The state of a job."""

    path: Path  # the folder with the records of its ranks
    size: int  # number of ranks on all hosts
    states: list[RankState]  # what the ranks of this host are doing
    waits_for: dict[int, list[int]]  # rank -> the ranks of this host that have not entered the collective that it is in
    finding: str  # why ranks wait in vain, or empty

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_running(self) -> bool:
        """Whether a process of it is alive."""
        return any(state.state not in ("gone", "killed", "ended", "failed", "unknown") for state in self.states)

    @property
    def condition(self) -> str:
        return "runs" if self.is_running else "has ended"

    @property
    def program(self) -> str:
        """The script that it runs."""
        return next((state.program for state in self.states if state.program), "")

    def has_process(self, pid: int) -> bool:
        """Return whether a process is one of its ranks that exist, or has started one."""
        ranks = [process.find(state.pid) for state in self.states if state.state not in ("gone", "killed", "unknown")]
        return any(each.pid == pid for rank in ranks if rank for each in (rank, *process.ancestors(rank.pid)))

    def document(self) -> dict[str, Any]:
        return {
            "job": self.name,
            "program": self.program,
            "size": self.size,
            "is_running": self.is_running,
            "ranks": encode(self.states),
            "waits_for": self.waits_for,
            "finding": self.finding,
        }


def examine(job: Path) -> JobReport | None:
    """Return the state of the job whose ranks keep their records in a folder, or None if there are no records."""
    neighbours = Neighbours(job)
    files = neighbours.files()
    if not files:
        return None
    size = max(file.size for file in files)
    states, keys = neighbours.states(expected=range(size))
    finding = judge(states, keys)
    if finding is not None and any(state.state in ("in", "out") for state in states):
        time.sleep(_AGAIN_SECONDS)
        states, keys = neighbours.states(keys, range(size))
        again = judge(states, keys)
        finding = again if again is not None and again.fingerprint == finding.fingerprint else None
    return JobReport(job, size, states, waits_for(states, keys), finding.notice.text if finding else "")


def _chosen(jobs: Sequence[JobReport], wanted: str) -> list[JobReport]:
    if not wanted:
        running = [job for job in jobs if job.is_running]
        return running if len(running) == 1 else [*jobs]
    found = [job for job in jobs if job.name == wanted] or (_of_process(jobs, int(wanted)) if wanted.isdecimal() else [])
    found = found or [job for job in jobs if job.name.startswith(wanted)]
    if not found:
        known = ", ".join(job.name for job in jobs[:_MOST_SHOWN]) or "none"
        raise InvalidArgumentError(f"no job of this user on this host has the name or a process {wanted!r}; jobs: {known}")
    return found


def _of_process(jobs: Sequence[JobReport], pid: int) -> list[JobReport]:
    """Return the jobs for which a process is a rank or has started one; if there is none, the last job that had this pid."""
    there = [job for job in jobs if job.has_process(pid)]
    running = [job for job in there if job.is_running]  # ranks that have ended may have had pids of theirs
    return running or there or [job for job in jobs if any(state.pid == pid for state in job.states)][:1]


def _list(jobs: Sequence[JobReport]) -> str:
    """Return a table of jobs, the running ones first, with the last few of those that have ended."""
    running, ended = ([job for job in jobs if job.is_running is state] for state in (True, False))
    shown = [*running, *ended[:_MOST_ENDED]]
    more = f"; {len(ended) - _MOST_ENDED} more have ended" if len(ended) > _MOST_ENDED else ""
    rows = [("job", "ranks here", "state", "program")]
    rows += [(job.name, f"{len(job.states)} of {job.size}", job.condition, job.program) for job in shown]
    return f"{format_table(rows)}\n\nmpistrat doctor JOB shows one of them{more}"


def _report(job: JobReport) -> str:
    ranks = f"{format_count(job.size, 'rank')}, {len(job.states)} of them on this host"
    head = f"job {job.name}: {ranks}; it {job.condition}\n{job.program}"
    rows: list[tuple[str, ...]] = [("rank", "node", "pid", "state", "collective", "since", "called at", "now at")]
    rows += [_rank_row(state) for state in job.states]
    parts = [head, format_table(rows, right=(0, 2)), *_waiting(job)]
    return "\n\n".join([*parts, job.finding] if job.finding else parts)


def _rank_row(state: RankState) -> tuple[str, ...]:
    call = state.call
    silent = ", held up in C" if state.is_silent else ""
    beginning = (str(state.rank), state.node, str(state.pid), state.state + silent)
    if state.activity:
        return *beginning, state.activity, "", "", state.now_at or "not known"
    if call is None:
        return *beginning, "none yet", "", "", state.now_at or "not known"
    if call.left_seconds_ago is None:
        since = f"in it for {format_elapsed(call.entered_seconds_ago)}"
    else:
        since = f"{'failed' if call.has_failed else 'left'} {format_elapsed(call.left_seconds_ago)} ago"
    now_at = "" if state.state == "ended" else state.now_at or "not known"
    text = call.text if len(call.text) <= _LONGEST_TEXT else f"{call.text[:_LONGEST_TEXT]}…"
    return *beginning, f"{call.number}, {text}", since, call.line or "not known", now_at


def _waiting(job: JobReport) -> list[str]:
    lines = []
    for missing, ranks in ranks_by((rank, tuple(others)) for rank, others in job.waits_for.items()).items():
        wait = "waits" if len(ranks) == 1 else "wait"
        if missing:
            lines.append(f"{ranks_text(ranks)} {wait} for {ranks_text(missing)}")
        else:
            lines.append(f"{ranks_text(ranks)} {wait}; no rank of this host is missing")
    return ["\n".join(lines)] if lines else []
