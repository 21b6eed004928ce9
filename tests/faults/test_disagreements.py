"""Ranks disagree, with default settings: each is told, nothing is computed on, and nobody's memory changes. And legal programs.

A selection of what ``python -m tests.benchmarks safety`` runs in full; ``python -m tests.disagreements`` runs single cases.
And a slice of ``python -m tests.fuzz``: random legal programs with random settings, such as messages of 500 bytes at most.
"""

import pytest

from tests.disagreements.deviations import REPORTED
from tests.disagreements.job import run_cases
from tests.disagreements.kinds import KINDS, drawn_plans, plan_of, quick_plans
from tests.disagreements.ranks import Place
from tests.fuzz.__main__ import play

_PATIENCE_SECONDS = 8.0
_ENOUGH = 12  # failures; each of them may have stood still for a while
# which part of all kinds is tried in a shape, with one or two cases each; shapes of equally many ranks draw the same kinds
_SHARES = {"1x2": 0.11, "2x2": 0.019, "1x4": 0.008, "3+1": 0.012, "hosts:2+2": 0.012}


def check(shape, plans, stall_seconds=3):
    """Run cases, and fail with those that did not end as they must."""
    wrong = []
    # longer than it takes to find out that ranks differ, so that a report does not come first
    for done in run_cases(shape, plans, {"MPISTRAT_STALL_SECONDS": str(stall_seconds)}, _PATIENCE_SECONDS):
        if not done.is_allowed:
            wrong.append(str(done))
        if len(wrong) >= _ENOUGH:
            break
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("shape", _SHARES)
def test_ranks_that_disagree_are_told(shape):
    place = Place(shape)
    if place.missing():
        pytest.skip(place.missing())
    check(shape, quick_plans(place.size, share=_SHARES[shape]))


ABSENT = [kind.name for kind in KINDS.values() if kind.allowed == REPORTED]
ON_SEVERAL_HOSTS = ["all_reduce.sleep", "all_reduce.barrier_of_mpi", "strategy.sleep", "all_reduce.stop", "all_reduce.end"]


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [*(("1x2", ABSENT[part::3]) for part in range(3)), ("1x4", ["of_two.sleep"]), ("hosts:1+1+1", ON_SEVERAL_HOSTS)],
    ids=["1x2, a third", "1x2, another", "1x2, the last", "1x4", "three hosts"],
)
def test_a_rank_that_does_not_come_is_named_with_its_line(shape, kinds):
    place = Place(shape)
    if place.missing():
        pytest.skip(place.missing())
    plans = (plan_of(KINDS[name], KINDS[name].sizes[-1], False, place.size) for name in kinds)
    check(shape, plans, stall_seconds=1)


@pytest.mark.parametrize("shape", ["1x2", "2+1", "2x2"])
def test_one_disagreement_in_a_random_program_is_told(shape):
    check(shape, drawn_plans("drawn_program", Place(shape).size, 8, 100_000))


def test_no_pair_of_calls_changes_memory_of_others():
    check("1x2", drawn_plans("drawn_pair", 2, 100, 100_000))


@pytest.mark.parametrize(("shape", "seed"), [("2x1", 5), ("3+1", 3)])
def test_random_programs_are_right(shape, seed):
    wrong = [f"{failure.command}\n{failure.text}" for failure in play(shape, seed, 60)]
    assert not wrong, "\n".join(wrong)
