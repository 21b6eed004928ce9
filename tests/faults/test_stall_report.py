"""Whatever a rank does instead of coming: stderr says which rank is missing, and at which line of the program it is.

All of it on one host, and what differs on several; ``python -m tests.benchmarks safety_hangs`` tries all of it there as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.disagreements.hangs import HANGS, WAITS, Hang, find_report
from tests.disagreements.places import Place

ALL = HANGS | WAITS
ON_SEVERAL_HOSTS = ("stopped", "sleeps in C", "ended", "in MPI's own barrier", "makes a strategy", "large all_reduce")


@pytest.fixture(scope="module")
def one_host() -> Iterator[Place]:
    """Give three ranks of one host."""
    yield from _place("1x3")


@pytest.fixture(scope="module")
def four_hosts() -> Iterator[Place]:
    """Give a rank on each of four hosts."""
    yield from _place("hosts:1+1+1+1")


@pytest.mark.parametrize("name", ALL)
def test_the_rank_that_does_not_come_and_its_line_are_named(one_host: Place, name: str) -> None:
    check(one_host, ALL[name])


@pytest.mark.parametrize("name", ON_SEVERAL_HOSTS)
def test_they_are_named_on_other_hosts(four_hosts: Place, name: str) -> None:
    check(four_hosts, ALL[name])


def check(place: Place, hang: Hang) -> None:
    """Run the program, and fail if the report does not name what it must."""
    found = find_report(place, hang)
    assert found.is_right(hang), found.output


def _place(shape: str) -> Iterator[Place]:
    place = Place(shape)
    if place.missing():
        pytest.skip(place.missing())
    yield place
    place.close()
