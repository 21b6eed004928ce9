"""Verdicts: in which class a case belongs, by what its ranks said, how the job ended, and what is on stderr."""

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

    def add(self, words: Mapping[str, Any]) -> None:
        rank = words["rank"]
        self.is_begun |= words.get("at") == "disagreement"
        if "values" in words:
            self.values[rank] = words["values"]
        if "ended" in words:
            self.ended[rank] = words["ended"]
            self.values[rank] = words["ended"]["values"]


@dataclass(frozen=True)
class Verdict:
    name: str  # of CLASSES
    text: str  # what each rank did
    further: int = 0  # after how many further calls the last rank was told; 0 where it was told in the calls themselves


def judge(evidence: Evidence, says: str, odd: int, alone: bool, is_right: bool, place: str = "") -> Verdict:
    """Return the class of a case, which may be right in spite of the difference, or not; a report must hold the `place`."""
    text, output, code = _text(evidence), evidence.output, evidence.exit_code
    if evidence.foreign:
        return Verdict("foreign", f"{'; '.join(evidence.foreign[:3])}; {text}")
    if (code is not None or evidence.still) and _CRASHED.search(output) and "MPI_ABORT was invoked" not in output:
        return Verdict("crash", f"{_last_lines(output)}; {text}")
    if evidence.still:
        if is_reported(output, odd, alone, place):
            return Verdict("reported", f"{', '.join(missing_in_report(output, odd)[:1])}; {text}")
        return Verdict("partial" if evidence.ended else "hang", text)
    if code is not None:
        name = "told" if code and re.search(says, f"{output}\nexit:{code}") else "raw" if code or not alone else "silent"
        return Verdict(name, f"exit code {code}, {_last_lines(output)}; {text}")
    errors = [ended["error"] for ended in evidence.ended.values()]
    if all(errors):
        further = max(ended.get("further", 0) for ended in evidence.ended.values())
        return Verdict("told" if all(told(error, odd) for error in errors) else "raw", text, further)
    if any(errors):
        return Verdict("partial", text)
    wrong = any("wrong" in value for values in evidence.values.values() for value in values)
    return Verdict("right" if is_right and not wrong else "silent", text)


def told(error: Mapping[str, Any], odd: int) -> bool:
    """Return whether an error that a rank raised tells of the difference: an AgreementError must name the odd rank."""
    if "AgreementError" in error["bases"]:
        return odd in ranks_named(error["text"])
    if _RAW.search(error["text"]):
        return False
    return bool(_OURS & set(error["bases"])) or (error["raised_by_us"] and "MpistratError" not in error["bases"])


def is_reported(output: str, odd: int, alone: bool, place: str) -> bool:
    """Return whether a stall report names a rank, and its line; one that has ended, or is stopped, is at none."""
    is_named = missing_in_report(output, odd) or (alone and _says_missing(output, odd))
    return bool(is_named and re.search(place and f"missing: .*(?:{place})", output))


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


def _says_missing(output: str, odd: int) -> bool:
    report = _REPORT.search(output)
    words = _ABSENT.finditer(output, report.start() if report else len(output))
    return any(odd in ranks_named(output[word.start() :].splitlines()[0]) for word in words)


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
