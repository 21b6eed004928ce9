"""The harness of disagreements judges rightly: by what ranks say, by what a job prints, and by what became of canaries."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.disagreements.hangs import HANGS, WAITS
from tests.disagreements.kinds import KINDS, all_plans, drawn_plans, quick_plans
from tests.disagreements.memory import Memory, Neighbours, changed
from tests.disagreements.signatures import DIFFERENCES, draw_program, other_than, with_disagreement
from tests.disagreements.verdicts import Evidence, judge, missing_in_report, ranks_named

TOLD = {"type": "AgreementError", "bases": ["AgreementError"], "text": "ranks made different calls", "raised_by_us": True}
RAW = {"type": "Exception", "bases": ["Exception"], "text": "MPI_ERR_TRUNCATE: message truncated", "raised_by_us": False}
NUMPY = {"type": "ValueError", "bases": ["ValueError"], "text": "operands could not be broadcast", "raised_by_us": False}
ERRNO = {"type": "UnavailableError", "bases": ["UnavailableError"], "text": "(Bad address)", "raised_by_us": True}
REPORT = "rank 0: waiting 3 s in all_reduce\n  missing: rank 2 (node1), at train.py:17, alive\n"


def ended(*errors: dict[str, Any] | None) -> dict[int, dict[str, Any]]:
    return {rank: {"error": error, "must_be_told": False} for rank, error in enumerate(errors)}


@pytest.mark.parametrize(
    ("name", "evidence"),
    [
        ("right", Evidence(2, ended(None, None), {0: ["all_reduce right"], 1: ["all_reduce right"]})),
        ("silent", Evidence(2, ended(None, None), {0: ["all_reduce right"], 1: ["all_reduce wrong"]})),
        ("told", Evidence(2, ended(TOLD, TOLD))),
        ("told", Evidence(2, ended(TOLD, TOLD), {0: ["all_reduce wrong"]})),
        ("partial", Evidence(2, ended(TOLD, None))),
        ("partial", Evidence(2, {0: ended(TOLD)[0]}, still=True)),
        ("raw", Evidence(2, ended(TOLD, RAW))),
        ("raw", Evidence(2, ended(NUMPY, NUMPY))),
        ("raw", Evidence(2, ended(ERRNO, ERRNO))),
        ("raw", Evidence(2, exit_code=1, output="MPI_ERR_TRUNCATE")),
        ("told", Evidence(2, exit_code=1, output="[rank 0 on a] mpistrat.errors.AgreementError: ranks")),
        ("crash", Evidence(2, exit_code=134, output="free(): invalid next size (normal)")),
        ("crash", Evidence(2, exit_code=139, output="process rank 0 exited on signal 11")),
        ("hang", Evidence(2, still=True)),
        ("hang", Evidence(3, still=True, output=REPORT.replace("rank 2", "rank 1"))),
        ("reported", Evidence(3, still=True, output=REPORT)),
        ("foreign", Evidence(2, ended(TOLD, TOLD), foreign=["rank 0: 8 bytes of a canary"])),
    ],
)
def test_a_case_is_put_in_its_class(name: str, evidence: Evidence) -> None:
    assert judge(evidence, "AgreementError", odd=2, alone=False).name == name


def test_a_value_or_an_end_in_the_place_of_an_error_is_silent() -> None:
    found = {rank: {**line, "must_be_told": True} for rank, line in ended(None, None).items()}
    assert judge(Evidence(2, found), "", odd=0, alone=False).name == "silent"
    assert judge(Evidence(2, exit_code=0), "AgreementError", odd=0, alone=True).name == "silent"


def test_of_a_rank_that_has_ended_a_report_names_no_line() -> None:
    evidence = Evidence(3, still=True, output="rank 0 has waited 3 s\n  missing: rank 2 (a): gone")
    assert judge(evidence, "", odd=2, alone=True).name == "reported"
    assert judge(evidence, "", odd=1, alone=True).name == "hang"
    assert judge(evidence, "", odd=2, alone=False).name == "hang"


def test_a_report_must_name_rank_and_line() -> None:
    assert missing_in_report(REPORT, 2) == ["train.py:17"]
    assert missing_in_report(REPORT, 1) == []
    assert missing_in_report(REPORT.replace("train.py:17, ", ""), 2) == []
    assert missing_in_report(REPORT.replace("waiting", "idle"), 2) == []
    assert missing_in_report('waiting; not come: rank 2:\n  File "a/train.py", line 17, in step', 2) == ["train.py:17"]
    assert ranks_named("ranks 0-2, 4: a\n  rank 7: b") == {0, 1, 2, 4, 7}
    places = "missing: rank 1 is at job.py:31\nmissing: rank 2 is at job.py:40\nin it: rank 3, job.py:7"
    found = [missing_in_report(f"rank 0 has waited\n{places}", rank) for rank in range(4)]
    assert found == [[], ["job.py:31"], ["job.py:40"], []]


def test_what_is_written_beside_an_array_is_found_from_outside(tmp_path) -> None:
    memory = Memory(tmp_path / "memory")
    operand, result = memory.array(1000, "float64"), memory.array((3, 5), "int8", misaligned=1)
    operand[...] = 1
    memory.seal(operand)
    result[...] = 7
    assert changed(tmp_path / "memory") == []
    assert result.__array_interface__["data"][0] % 2
    beyond = np.lib.stride_tricks.as_strided(operand, (1003,), (8,))
    beyond[1001] += 1.0
    assert changed(tmp_path / "memory") == ["1 bytes of a canary of 8000, the first at 11"]
    memory.reset()
    again = memory.array(1000, "float64")
    memory.seal(again)
    again[3] += 1
    assert changed(tmp_path / "memory") == ["an operand of 8000 bytes"]
    neighbours = Neighbours(80)
    assert neighbours.changed() == []
    neighbours._kept[2][5] = 0
    assert neighbours.changed() == ["1 bytes of an array that takes part in nothing"]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_random_program_differs_in_one_place(difference: str) -> None:
    found = 0
    for seed in range(300):
        random_ = random.Random(seed)
        calls = draw_program(random_, 4, 1000)
        what, odd = with_disagreement(random_, calls, 4, 1000)
        assert 5 <= len(calls) <= 15
        assert odd != calls
        assert abs(len(odd) - len(calls)) <= 1
        found += what.startswith(difference)
    assert found


def test_what_ranks_may_do_differently_is_not_drawn_as_a_difference() -> None:
    for seed in range(500):
        random_ = random.Random(seed)
        for call in draw_program(random_, 4, 1000):
            for what in ("op", "dtype", "shape"):
                other = other_than(random_, call, what, 4, 1000)
                if other != call and call.verb == "broadcast":
                    assert other.place != call.place
                if other != call and call.verb == "all_gather":
                    assert (other.dtype, len(other.shape)) != (call.dtype, len(call.shape))


def test_there_are_kinds_and_cases_enough() -> None:
    disagreements = [kind for kind in KINDS.values() if kind.sizes and kind.family != "legal"]
    assert len(disagreements) >= 45
    plans = list(all_plans(4))
    assert len(set(plans)) == len(plans)
    assert {plan.odd for plan in plans} == {0, 1, 2, 3}
    assert {plan.kind for plan in quick_plans(4)} == {plan.kind for plan in plans}
    assert list(drawn_plans("drawn_pair", 2, 5, 100)) == list(drawn_plans("drawn_pair", 2, 5, 100))
    assert all(hang.lines for hang in (*HANGS.values(), *WAITS.values()))
    assert len(HANGS) == 12
