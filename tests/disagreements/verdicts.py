"""Verdicts: in which class a case belongs, by what its ranks said, how the job ended, and what is on stderr."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Best first; what each means is on docs/benchmarks/safety.md.
CLASSES = ("right", "told", "reported", "raw", "hang", "partial", "silent", "crash", "foreign")

_CRASHED = re.compile(
    r"Segmentation fault|signal (?:11|6|7|8|4)\b|Signal: (?:Segmentation|Aborted|Bus)|double free|free\(\): |malloc\(\): |"
    r"corrupted size|malloc_consolidate|munmap_chunk|exited on signal (?!9\b)"
)
_REPORT = re.compile(r"waiting|waited", re.IGNORECASE)
_MISSING = re.compile(r"\branks? (\d+(?:[-–, ]+(?:and )?\d+)*)")
_ABSENT = re.compile(r"missing|absent|not (?:yet )?(?:in it|come|arrived)", re.IGNORECASE)
_LINE = re.compile(r"(\w[\w./-]*\.py)(?::|\", line )(\d+)")
_RAW = re.compile(r"Bad address|bytes failed|MPI_ERR|Errno|No such process", re.IGNORECASE)
_OURS = {
    "AgreementError",
    "LaunchError",
    "DeadlineExceededError",
    "UnavailableError",
    "InvalidArgumentError",
    "UnsupportedDtypeError",
}


@dataclass
class Evidence:
    """What became known of a case."""

    size: int  # how many ranks there are
    # by rank: what it said at the end of the case; of ranks that said nothing, nothing
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)
    values: dict[int, list[str]] = field(default_factory=dict)  # by rank: which results it has had, right or wrong
    foreign: list[str] = field(default_factory=list)  # whose memory was changed, and how
    output: str = ""  # what the job printed meanwhile
    exit_code: int | None = None  # of the job, if it ended by itself
    still: bool = False  # whether the job was ended because nothing happened any more
    is_begun: bool = False  # whether a rank had come to the disagreement
    note: str = ""  # what the case says of itself


@dataclass(frozen=True)
class Verdict:
    """A class, and why."""

    name: str  # of CLASSES
    text: str  # what each rank did
    further: int = 0  # after how many further calls the last rank was told; 0 where it was told in the calls themselves


def judge(evidence: Evidence, says: str, odd: int, alone: bool) -> Verdict:
    """Return the class of a case."""
    text = _text(evidence)
    if evidence.foreign:
        return Verdict("foreign", f"{'; '.join(evidence.foreign[:3])}; {text}")
    ended_by_itself = evidence.exit_code is not None
    crashed = _CRASHED.search(evidence.output) and "MPI_ABORT was invoked" not in evidence.output
    if crashed and (ended_by_itself or evidence.still):
        return Verdict("crash", f"{_last_lines(evidence.output)}; {text}")
    if evidence.still:
        return _of_one_that_stands(evidence, odd, alone, text)
    if ended_by_itself:
        return _of_one_that_ended(evidence, says, alone, text)
    return _of_all_ranks(evidence, text)


def told(error: Mapping[str, Any]) -> bool:
    """Return whether an error that a rank raised tells of the difference."""
    if "AgreementError" in error["bases"]:
        return True
    if _RAW.search(error["text"]):
        return False
    return bool(_OURS & set(error["bases"])) or (error["raised_by_us"] and "MpistratError" not in error["bases"])


def missing_in_report(output: str, odd: int) -> list[str]:
    """Return the lines of source, as ``file.py:17``, that a stall report names for a rank that has not come."""
    report = _REPORT.search(output)
    found: list[str] = []
    for word in _ABSENT.finditer(output, report.start() if report else len(output)):
        part = output[word.start() : word.start() + 1500].partition("in it")[0]
        for named in _MISSING.finditer(part):
            if odd in _numbers(named[1]):
                # what is said of the next rank is said of that one
                words = re.split(r"\branks? \d", part[named.end() :])[0]
                found += [f"{Path(place[1]).name}:{place[2]}" for place in _LINE.finditer(words)]
    return list(dict.fromkeys(found))


def ranks_named(text: str) -> set[int]:
    """Return all ranks that a text names: ``rank 3`` and ``ranks 0-2, 4``."""
    return set().union(*(_numbers(match[1]) for match in _MISSING.finditer(text)))


def _numbers(text: str) -> set[int]:
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:\s*[-–]\s*(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _of_one_that_stands(evidence: Evidence, odd: int, alone: bool, text: str) -> Verdict:
    lines = missing_in_report(evidence.output, odd)
    # a rank that has ended is at no line
    if lines or (alone and _says_missing(evidence.output, odd)):
        return Verdict("reported", f"{', '.join(lines[:1])}; {text}")
    if evidence.ended:
        return Verdict("partial", text)
    return Verdict("hang", text)


def _says_missing(output: str, odd: int) -> bool:
    report = _REPORT.search(output)
    words = _ABSENT.finditer(output, report.start() if report else len(output))
    return any(odd in ranks_named(output[word.start() :].splitlines()[0]) for word in words)


def _of_one_that_ended(evidence: Evidence, says: str, alone: bool, text: str) -> Verdict:
    output = f"{evidence.output}\nexit:{evidence.exit_code}"
    if alone and evidence.exit_code == 0:
        return Verdict("silent", f"exit code 0; {text}")
    if evidence.exit_code != 0 and re.search(says, output):
        return Verdict("told", f"exit code {evidence.exit_code}, {_last_lines(evidence.output)}; {text}")
    return Verdict("raw", f"exit code {evidence.exit_code}, {_last_lines(evidence.output)}; {text}")


def _of_all_ranks(evidence: Evidence, text: str) -> Verdict:
    errors = [ended["error"] for ended in evidence.ended.values()]
    if all(errors):
        return Verdict("told" if all(map(told, errors)) else "raw", text, max(map(_further, evidence.ended.values())))
    if any(errors):
        return Verdict("partial", text)
    wrong = any("wrong" in value for values in evidence.values.values() for value in values)
    should_be_error = any(ended.get("must_be_told") for ended in evidence.ended.values())
    return Verdict("silent" if wrong or should_be_error else "right", text)


def _further(ended: Mapping[str, Any]) -> int:
    further = ended.get("further", 0)
    return 71 if further == "reduce" else int(further)


def _text(evidence: Evidence) -> str:
    parts = []
    for rank in range(evidence.size):
        ended = evidence.ended.get(rank)
        wrong = [value for value in evidence.values.get(rank, []) if "wrong" in value]
        values = f", {len(wrong)} wrong" if wrong else ""
        if ended is None:
            parts.append(f"rank {rank}: nothing{values}")
        elif ended["error"]:
            error = ended["error"]
            head = error["text"].splitlines()[0][:100] if error["text"] else ""
            late = f" after {ended['further']} further" if ended.get("further") else ""
            parts.append(f"rank {rank}: {error['type']}{late} ({head}){values}")
        else:
            parts.append(f"rank {rank}: went on{values}")
    return "; ".join(dict.fromkeys(parts))


def _last_lines(output: str, count: int = 2) -> str:
    lines = [line.strip("\0 ") for line in output.splitlines() if line.strip("\0 -*")]
    told_lines = [line for line in lines if "Error" in line or "signal" in line]
    return " | ".join((told_lines or lines)[-count:])[:400]
