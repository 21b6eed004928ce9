"""How algorithms are timed in turns."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from mpistrat.tuning.measure import race


def test_what_was_slow_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds() -> Iterator[float]:
        yield 0.055  # another program had the core
        while True:
            yield 2e-5

    clocks = {"flat": seconds(), "second": iter(lambda: 3e-5, None), "third": iter(lambda: 2e-3, None)}
    rounds = dict.fromkeys(clocks, 0)

    def timed(_: object, run: Mock, count: int) -> list[float]:
        name = names[run]
        rounds[name] += count
        return [next(clocks[name]) for _ in range(count)]

    monkeypatch.setattr("mpistrat.tuning.measure.slowest_seconds", timed)
    monkeypatch.setattr("mpistrat.tuning.measure._TRIES", 1)
    runs = {name: Mock() for name in clocks}
    names = {run: name for name, run in runs.items()}
    found = race(Mock(), lambda _: dict(runs), [16])
    assert found == {16: {"flat": 2e-5, "second": 3e-5, "third": 2e-3}}
    assert rounds["third"] < 20 < rounds["flat"]  # what is slow each time costs little
