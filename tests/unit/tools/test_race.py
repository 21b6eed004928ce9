"""How calls are timed in turns."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from mpistrat.tools.bench import MAX_BLOCKS, MAX_ROUNDS, MIN_BLOCKS, MIN_ROUNDS, Race


@pytest.mark.parametrize(
    ("first", "later", "rounds"),
    [
        (2e-5, 2e-5, MAX_BLOCKS * MAX_ROUNDS),
        (2.0, 2.0, MIN_BLOCKS * MIN_ROUNDS),
        (0.055, 2e-5, MAX_BLOCKS * 6),  # another program had the core
    ],
)
def test_what_was_slow_once_is_outvoted_and_what_is_slow_is_timed_less(
    monkeypatch: pytest.MonkeyPatch, first: float, later: float, rounds: int
) -> None:
    calls = [Mock(name="one"), Mock(name="other")]
    clocks = {calls[0]: iter([first, first]), calls[1]: iter([])}

    def timed(_: object, call: Mock, count: int) -> list[float]:
        return [first] if call not in clocks else [next(clocks[call], later) for _ in range(count)]

    monkeypatch.setattr("mpistrat.tools.bench.slowest_seconds", timed)
    race = Race(Mock(), calls)
    assert race.run() == [later, later]
    assert race.rounds == rounds
