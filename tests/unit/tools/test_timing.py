"""How bench times calls in turns, and demo its steps: what is counted, and from when to when."""

from unittest.mock import Mock

import pytest

from mpistrat.timeline import Timeline, TimelineEvent
from mpistrat.tools import demo
from mpistrat.tools.bench import MAX_BLOCKS, MAX_ROUNDS, MIN_BLOCKS, MIN_ROUNDS, Race
from mpistrat.tools.demo import Meter, Step, means


@pytest.mark.parametrize(
    ("first", "later", "rounds"),
    [
        (2e-5, 2e-5, MAX_BLOCKS * MAX_ROUNDS),
        (2.0, 2.0, MIN_BLOCKS * MIN_ROUNDS),
        (0.055, 2e-5, MAX_BLOCKS * 6),  # another program had the core
    ],
)
def test_what_was_slow_once_is_outvoted_and_what_is_slow_is_timed_less(monkeypatch, first, later, rounds):
    calls = [Mock(name="one"), Mock(name="other")]
    clocks = {calls[0]: iter([first, first]), calls[1]: iter([])}

    def timed(_, call, count):
        return [first] if call not in clocks else [next(clocks[call], later) for _ in range(count)]

    monkeypatch.setattr("mpistrat.tools.bench.slowest_seconds", timed)
    race = Race(Mock(), calls)
    assert race.run() == [later, later]
    assert race.rounds == rounds


def test_steps_follow_each_other(monkeypatch):
    timeline, clock = Timeline(), iter([3.0, 10.0, 12.0, 12.0, 16.0, 16.0])
    monkeypatch.setattr(demo.time, "perf_counter", lambda: next(clock))
    measured = Meter(timeline)
    assert timeline.enabled
    timeline.events.append(TimelineEvent("broadcast", "world", 4.0, 9.0, 0))
    measured.start()
    timeline.events += [TimelineEvent("ring", "inter", 10.0, 10.5, 0), TimelineEvent("sum", "intra", 10.25, 11.0, 0)]
    assert measured.end_step(0, 2.0, 100) == Step(0, 2.0, 100, 2.0, 1.0)
    timeline.events.append(TimelineEvent("sum", "world", 13.0, 14.0, 0))
    assert measured.end_step(0, 1.0, 50) == Step(0, 1.0, 50, 4.0, 1.0)
    assert [event[:4] for event in timeline.events if event.lane == "step"] == [
        ("step 0", "step", 10.0, 12.0),
        ("step 1", "step", 12.0, 16.0),
    ]


def test_means_weigh_steps_by_images_and_seconds():
    steps = [Step(0, 2.0, 100, 2.0, 1.0), Step(0, 1.0, 50, 4.0, 0.5)]
    assert means(steps) == (pytest.approx(250 / 150), 25.0, 0.25)
