"""Whatever a rank does instead of coming: stderr says which rank is missing, and at which line of the program it is.

All of it on one host, and what differs on several; ``python -m tests.benchmarks safety_hangs`` tries all of it there as well.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.disagreements.hangs import HANGS, WAITS, find_report, find_reports
from tests.disagreements.ranks import Place

ALL = HANGS | WAITS
_JOBS_AT_A_TIME = 3  # as they mostly wait
_OF_SOME = "making a Communicator of some ranks"
_HOSTS = "hosts:1+1+1"
ON_SEVERAL_HOSTS = ("sleeps in C", "ended", "in MPI's own barrier", "makes a strategy", "large all_reduce")
_SILENT = "missing: rank 1: does not answer; mpistrat doctor on its host shows what it does"
CASES = [
    *((name, "1x2", "") for name in HANGS if name not in ("reads a pipe", "in a lock")),  # as in other C
    (_OF_SOME, "1x3", ""),
    *((name, _HOSTS, "") for name in ON_SEVERAL_HOSTS),
    ("stopped", _HOSTS, _SILENT),
]


def _find(name, shape, until):
    place = Place(shape)
    try:
        return find_report(place, ALL[name], until=until)
    finally:
        place.close()


@pytest.fixture(scope="module")
def reports(request):
    """Give what ranks report, for every selected test."""
    function = test_the_rank_that_does_not_come_and_its_line_are_named.__name__
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.originalname == function]
    cases = [case for case in (item.callspec.params["case"] for item in items) if not Place(case[1]).missing()]
    with ThreadPoolExecutor(_JOBS_AT_A_TIME) as pool:
        yield {case: pool.submit(_find, *case) for case in cases}
        pool.shutdown(cancel_futures=True)


@pytest.mark.usefixtures("reports")  # which are looked for meanwhile
def test_whatever_the_others_wait_in_the_rank_and_its_line_are_named():
    waits = {name: hang for name, hang in WAITS.items() if name != _OF_SOME}
    found = find_reports(Place("1x2"), waits.values())
    assert found[-1].line, f"{list(waits)[len(found) - 1]}: {found[-1].output}"
    assert len(found) == len(waits)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_rank_that_does_not_come_and_its_line_are_named(reports, case):
    name, shape, until = case
    if missing := Place(shape).missing():
        pytest.skip(missing)
    found = reports[case].result()
    assert until in found.output if until else found.is_right(ALL[name]), found.output
