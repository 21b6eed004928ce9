"""`mpistrat doctor`: which job is meant, where numbers of processes are given out again."""

import argparse
import json
import os

import numpy as np
import pytest

from mpistrat.errors import InvalidArgumentError
from mpistrat.tools import cli, doctor
from mpistrat.watch import record as records
from mpistrat.watch import states
from mpistrat.watch.recorder import FlightRecorder
from mpistrat.watch.states import RankState


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Write the record of a job of one rank: of this process, or of one of its number that was killed so many seconds ago."""
    monkeypatch.setattr(records, "bases", lambda: [tmp_path])
    tmp_path.chmod(0o700)

    def write(name, killed=None, state=records.State.RUNNING):
        (tmp_path / name).mkdir(mode=0o700)
        recorder = FlightRecorder(tmp_path / name / "rank-0")
        recorder.note(state=state)
        if killed is not None:
            recorder._header["started"] = 1
            seconds = (tmp_path / name).stat().st_mtime - killed
            os.utime(tmp_path / name, (seconds, seconds))

    return write


def jobs_of(capsys, wanted):
    assert doctor.execute(argparse.Namespace(job=wanted, json=True)) == 0
    return [job["job"] for job in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize("pid", [os.getpid(), os.getppid()], ids=["the rank", "what has started it"])
def test_a_process_is_of_the_job_that_runs_and_not_of_one_killed_before(record, capsys, pid):
    record("killed", killed=60)
    record("ended", killed=60, state=records.State.ENDED)
    record("running")
    assert jobs_of(capsys, str(pid)) == ["running"]


def test_a_damaged_record_is_left_out(record, capsys, tmp_path):
    record("whole")
    record("damaged")
    np.memmap(tmp_path / "damaged" / "rank-0", records.HEADER, "r+", shape=1)["size"] = 2**40
    assert jobs_of(capsys, str(os.getpid())) == ["whole"]


def test_where_none_runs_the_last_one_with_such_a_rank_is_meant(record, capsys):
    record("first", killed=120)
    record("second", killed=60)
    assert jobs_of(capsys, str(os.getpid())) == ["second"]
    assert jobs_of(capsys, "first") == ["first"]
    with pytest.raises(InvalidArgumentError, match="has the name or a process"):
        jobs_of(capsys, str(os.getppid()))


def test_what_a_process_has_started_is_described(record):
    record("killed", killed=60)
    assert doctor.describe(os.getppid()) == ""
    record("running")
    assert doctor.describe(os.getppid()).startswith("job running: 1 rank, 1 of them on this host; it runs\n")


def test_running_jobs_come_first_and_few_that_have_ended(record, capsys):
    for seconds in range(8):
        record(f"killed-{seconds}", killed=seconds)
    record("running-1")
    record("running-2")
    assert doctor.execute(argparse.Namespace(job="", json=False)) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    names = [row.split()[0] for row in rows if row]
    assert sorted(names[:2]) == ["running-1", "running-2"]
    assert names[2:-1] == [f"killed-{seconds}" for seconds in range(5)]
    assert rows[-1].endswith("; 3 more have ended")


def test_without_jobs_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(records, "bases", lambda: [tmp_path / "none"])
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("no mpistrat job of this user is running on this host")
    for name in ("no-such-job", "²"):
        assert cli.main(["doctor", name]) == 2
        assert f"no job of this user on this host has the name or a process {name!r}" in capsys.readouterr().err


def test_a_call_of_many_arrays_is_cut_in_the_table():
    text = f"all_reduce(SUM, [{', '.join(['float32 (1000,)'] * 161)}])"
    call = records.RecordedCall(1, 7, text, 0, "train.py:3", entered=1, entered_seconds_ago=0.5, left_seconds_ago=None)
    collective = doctor._rank_row(RankState(0, state="in", calls=(call,)))[4]
    assert collective.startswith("7, all_reduce(SUM, [float32 (1000,), ")
    assert collective.endswith("…")
    assert len(collective) < 120


def test_ranks_without_a_strategy_stay_in_a_report_of_ranks_that_wait_in_vain(record, monkeypatch, tmp_path):
    record("job")
    waiting = FlightRecorder(tmp_path / "job" / "rank-0", 0, 3)
    waiting.enter(0, 0, waiting.intern("barrier()"))
    FlightRecorder(tmp_path / "job" / "rank-1", 1, 3).note(state=records.State.FAILED)
    monkeypatch.setattr(states, "_absent", lambda job, ranks: [RankState(rank, state="absent") for rank in sorted(ranks)])
    found = doctor.examine(tmp_path / "job")
    assert "rank 1 will not come" in found.finding
    assert [state.state for state in found.states] == ["in", "failed", "absent"]
    assert found.waits_for == {0: [1, 2]}
