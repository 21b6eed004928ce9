"""Whatever a rank does instead of coming: stderr says which rank is missing, and at which line of the program it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.disagreements.hangs import HANGS, WAITS, Hang, find_report
from tests.disagreements.places import Place

ONE_HOST, FOUR_HOSTS = "1x3", "hosts:1+1+1+1"


@pytest.fixture(scope="module", params=[ONE_HOST, FOUR_HOSTS])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Give one host, and then four."""
    place = Place(request.param)
    if place.missing():
        pytest.skip(place.missing())
    yield place
    place.close()


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_the_rank_that_does_not_come_and_its_line_are_named(place: Place, hang: Hang) -> None:
    found = find_report(place, hang)
    assert found.is_right(hang), found.output


@pytest.mark.parametrize("hang", WAITS.values(), ids=WAITS)
def test_whatever_the_others_wait_in_the_missing_rank_is_named(place: Place, hang: Hang) -> None:
    found = find_report(place, hang)
    assert found.is_right(hang), found.output
