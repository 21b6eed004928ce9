"""The timeline: how long lanes were busy, and the file that a trace viewer opens."""

import json

from mpistrat.timeline import Timeline, TimelineEvent, write_chrome_trace
from tests.processes import python


def timeline(*events, epoch_seconds=0.0):
    made = Timeline()
    made.events, made.epoch_seconds = list(events), epoch_seconds
    return made


def test_seconds_during_which_two_lanes_are_busy_count_once():
    line = timeline(
        TimelineEvent("a", "intra", 0.0, 2.0, 0),
        TimelineEvent("b", "inter", 1.0, 3.0, 0),
        TimelineEvent("c", "intra", 5.0, 6.0, 0),
        TimelineEvent("d", "step", 0, 9, 0),
    )
    assert line.busy_seconds(["intra", "inter"]) == 4.0
    assert line.busy_seconds(["inter"]) == 2.0
    assert line.busy_seconds([]) == 0.0


def test_recording_notes_what_ended_now():
    line = Timeline()
    line.record("copy in", "intra", 0.0, 8)
    [event] = line.events
    assert event[:3] == ("copy in", "intra", 0.0)
    assert event.end_seconds > 0.0
    assert event.nbytes == 8


def test_a_trace_has_a_process_per_rank_and_a_named_row_per_lane(tmp_path):
    # both ranks did the same thing at the same time, on clocks with different origins
    first = timeline(
        TimelineEvent("sum", "intra", 1.0, 1.5, 64), TimelineEvent("ring", "inter", 1.5, 2.0, 32), epoch_seconds=100.0
    )
    second = timeline(TimelineEvent("sum", "intra", 11.0, 11.5, 64), epoch_seconds=90.0)
    write_chrome_trace(tmp_path / "trace.json", {1: second, 0: first})
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(row["name"], row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert names == {
        ("process_name", 0, 0): "rank 0",
        ("thread_name", 0, 0): "intra",
        ("thread_name", 0, 1): "inter",
        ("process_name", 1, 0): "rank 1",
        ("thread_name", 1, 0): "intra",
    }
    spans = [(row["name"], row["pid"], row["tid"], row["ts"], row["dur"], row["args"]) for row in rows if row["ph"] == "X"]
    assert spans == [
        ("sum", 0, 0, 0.0, 0.5e6, {"bytes": 64}),
        ("ring", 0, 1, 0.5e6, 0.5e6, {"bytes": 32}),
        ("sum", 1, 0, 0.0, 0.5e6, {"bytes": 64}),
    ]
    for nothing in ({}, {0: Timeline()}):
        write_chrome_trace(tmp_path / "trace.json", nothing)
        assert all(row["ph"] == "M" for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_a_program_of_one_process_writes_its_trace_at_exit(tmp_path):
    program = (
        "import time; from mpistrat.timeline import Timeline\n"
        "for name in 'ab': Timeline().record(name, 'intra', time.perf_counter(), 8)"
    )
    assert python(program, MPISTRAT_TIMELINE=str(tmp_path / "trace.json")).returncode == 0
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [row["name"] for row in rows if row["ph"] == "X"] == ["a", "b"]
    missing = str(tmp_path / "missing" / "trace.json")
    said = f"mpistrat: MPISTRAT_TIMELINE={missing} cannot be written: No such file or directory\n"
    assert python(program, MPISTRAT_TIMELINE=missing).stderr == said
