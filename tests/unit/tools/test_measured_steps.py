"""Measuring training steps: what is counted, and from when to when."""

from __future__ import annotations

import pytest

from mpistrat.timeline import Timeline, TimelineEvent
from mpistrat.tools import demo
from mpistrat.tools.demo import Meter, Step, means


def test_steps_follow_each_other(monkeypatch: pytest.MonkeyPatch):
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
