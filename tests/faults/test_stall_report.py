"""Whatever a rank does instead of coming: stderr says which rank is missing, and at which line of the program it is.

All of it on one host, and what differs on several; ``python -m tests.benchmarks safety_hangs`` tries all of it there as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.disagreements.hangs import HANGS, WAITS, Found, Hang, find_report
from tests.disagreements.places import Place

ALL = HANGS | WAITS
_JOBS_AT_A_TIME = 3
_SHAPES = {"making a Communicator of some ranks": "1x3"}  # of the others two ranks tell as much
ON_SEVERAL_HOSTS = ("sleeps in C", "ended", "in MPI's own barrier", "makes a strategy", "large all_reduce")


@pytest.fixture(scope="module")
def on_one_host(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Found]]]:
    """Give what ranks of one host report, for every selected test; a few jobs at a time, as they mostly wait."""
    function = test_the_rank_that_does_not_come_and_its_line_are_named.__name__
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.originalname == function]
    with ThreadPoolExecutor(_JOBS_AT_A_TIME) as pool:
        names = [str(item.callspec.params["name"]) for item in items]
        yield {name: pool.submit(find_report, Place(_SHAPES.get(name, "1x2")), ALL[name]) for name in names}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Place]:
    """Give a rank on each of three hosts."""
    place = Place("hosts:1+1+1")
    if place.missing():
        pytest.skip(place.missing())
    yield place
    place.close()


@pytest.mark.parametrize("name", ALL)
def test_the_rank_that_does_not_come_and_its_line_are_named(on_one_host: dict[str, Future[Found]], name: str) -> None:
    check(on_one_host[name].result(), ALL[name])


@pytest.mark.parametrize("name", ON_SEVERAL_HOSTS)
def test_they_are_named_on_other_hosts(three_hosts: Place, name: str) -> None:
    check(find_report(three_hosts, ALL[name]), ALL[name])


def test_a_rank_whose_host_does_not_answer_is_named(three_hosts: Place) -> None:
    text = "missing: rank 1: does not answer; mpistrat doctor on its host shows what it does"
    assert text in find_report(three_hosts, ALL["stopped"], until=text).output


def check(found: Found, hang: Hang) -> None:
    """Fail if the report does not name what it must."""
    assert found.is_right(hang), found.output
