"""The flight recorder: what is written can be read, by others, while it runs and after kill -9."""

import gc
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from mpistrat.launch import process
from mpistrat.watch import record as records
from mpistrat.watch.record import OVERWRITTEN, RECORD, RankFile, State
from mpistrat.watch.recorder import FlightRecorder, collection_paused, hash_of
from mpistrat.watch.verdict import Notice
from mpistrat.watch.watcher import Notices
from tests.processes import python

RING_RECORDS, CALLS, LINES = (RECORD[name].shape[0] for name in ("ring", "calls", "lines"))
TEXT = "all_reduce(SUM, [float64 (10,)])"


@pytest.fixture
def written(tmp_path):
    (tmp_path / "job").mkdir(mode=0o700)
    made = FlightRecorder(tmp_path / "job/rank-3", 3, 4)
    yield made
    made.close()


def read(recorder):
    return RankFile.open(recorder.path)


def call(recorder, text=TEXT):
    return recorder.intern(text, 80)


def last(recorder):
    return read(recorder).last()


def test_the_header_tells_whose_file_it_is(written):
    file = read(written)
    assert (file.rank, file.size, file.pid, file.state) == (3, 4, os.getpid(), State.RUNNING)
    assert file.text("program").split()[0] == sys.argv[0]
    assert file.last() is None
    written.note(node=b"node7")
    written.note(state=State.ENDED)
    assert (file.text("node"), file.state) == ("node7", State.ENDED)


def test_a_call_is_seen_while_it_is_inside_and_when_it_has_left(written):
    file, before = read(written), time.monotonic_ns()
    slot = written.enter(2, 17, call(written))
    [found] = file.inside()
    assert last(written).entered == found.entered
    assert (found.key, found.left_seconds_ago, found.has_failed, found.is_started) == ((2, 17), None, False, False)
    assert before <= found.entered <= time.monotonic_ns()
    assert (found.text, found.digest, found.nbytes, found.ranks) == (TEXT, hash_of(TEXT), 80, "")
    assert f"{Path(__file__).name}:" in found.line
    assert found.line.endswith("(test_a_call_is_seen_while_it_is_inside_and_when_it_has_left)")
    written.leave(slot)
    assert file.inside() == []
    left = last(written)
    assert 0 <= left.left_seconds_ago <= left.entered_seconds_ago
    written.fail(written.enter(0, 1, call(written)))
    failed = last(written)
    assert 0 <= failed.left_seconds_ago <= failed.entered_seconds_ago
    assert (left.has_failed, failed.has_failed, file.inside()) == (False, True, [])


def test_calls_of_two_threads_end_each_for_itself(written):
    first = written.enter(0, 1, call(written), written.find_line(sys._getframe()))
    second = written.enter(0, 2, call(written, "barrier()"))
    for is_awaited in (True, False):  # by the main thread, which does not go on then
        written.note(awaited=is_awaited)
        assert [(each.number, each.is_started) for each in read(written).inside()] == [(2, False), (1, not is_awaited)]
    written.leave(first)
    assert [record.number for record in read(written).inside()] == [2]
    written.leave(second)


def test_the_ring_keeps_the_last_4096_and_a_slot_that_is_used_again_forgets_the_failure_before(written):
    index = call(written)
    for number in range(RING_RECORDS + 5):
        written.leave(written.enter(0, number, index))
    calls = read(written).calls()
    assert [record.number for record in calls] == list(range(RING_RECORDS + 4, 4, -1))
    assert {record.text for record in calls} == {TEXT}
    assert read(written).find((0, 4)) == []
    assert [call.number for call in read(written).find((0, 5))] == [5]
    file = read(written)
    written.fail(written.enter(2, 0, call(written)))
    for number in range(1, RING_RECORDS):
        written.leave(written.enter(2, number, call(written)))
    slot = written.enter(2, RING_RECORDS, call(written))
    assert [record.number for record in file.inside()] == [RING_RECORDS]
    written.leave(slot)
    assert file.inside() == []


def test_equal_descriptions_share_an_index_and_the_least_recent_is_overwritten(written):
    first, second = call(written, "first"), call(written, "second")
    assert call(written, "first") == first != second
    written.leave(written.enter(0, 1, second))
    written.leave(written.enter(0, 2, first))
    for other in range(CALLS - 1):
        call(written, f"other {other}")
    assert [record.text for record in read(written).calls()] == ["first", OVERWRITTEN]
    assert call(written, "second") != second


def test_what_is_kept_of_texts_is_forgotten_once_others_have_taken_their_places(written):
    def enter():
        index = written.indexes["0-3"].get(hash_of(TEXT)) or written.intern(TEXT, 80, hash_of(TEXT), "0-3")
        written.leave(written.enter(0, 1, index))

    for _ in range(2):
        enter()
    kept = written.outdated
    for other in range(CALLS):
        call(written, f"other {other}")
    assert written.outdated is not kept
    enter()
    assert [record.text for record in read(written).calls()] == [TEXT, OVERWRITTEN, OVERWRITTEN]
    for number in range(LINES):  # what the watcher finds the program at
        written._lines.index(number, str(number))
    enter()
    assert [Path(__file__).name in record.line for record in read(written).calls()] == [True, False, False, False]


def test_long_texts_are_cut_and_told_apart_all_the_same(written):
    texts = ["x" * 5000 + end for end in "ab"]
    for number, text in enumerate(texts):
        written.leave(written.enter(0, number, call(written, text)))
    second, first = read(written).calls()
    assert first.text == second.text
    assert 900 < len(first.text) < 1024
    assert (first.digest, second.digest) == (hash_of(texts[0]), hash_of(texts[1]))


def test_lines_are_those_outside_the_library(written):
    inside: dict[str, object] = {"__name__": "mpistrat.cross_device.gate"}
    exec("def enter(recorder, index): return recorder.enter(0, 1, index)", inside)
    index = call(written)
    written.leave(inside["enter"](written, index))
    assert "(test_lines_are_those_outside_the_library)" in last(written).line
    for _ in range(2):
        written.leave(written.enter(0, 2, index))
        written.leave(written.enter(0, 3, index))
    assert len({record.line for record in read(written).calls()}) == 3


@pytest.mark.parametrize("folder", ["/short", "/päth/that is/" * 30])
def test_of_a_long_path_the_end_is_written(written, folder):
    file = f"{folder}/train.py"
    names = {"enter": written.enter, "index": call(written)}
    exec(compile("enter(0, 1, index)", file, "exec"), names)
    line = last(written).line
    assert line.endswith("/train.py:1 (<module>)")
    assert line.startswith("/short" if folder == "/short" else "…")
    assert len(line.encode()) in range(len("/short"), 256)


def test_lines_of_codes_that_are_gone_are_not_mixed_up(written):
    index = call(written)
    for number in range(2000):
        space = {"recorder": written, "index": index, "number": number}
        exec(compile("recorder.leave(recorder.enter(0, number, index))", f"file{number}", "exec"), space)
    assert {record.number: record.line for record in read(written).calls()} == {
        number: f"file{number}:1 (<module>)" if number >= 2000 - LINES else "" for number in range(2000)
    }


def test_a_number_that_was_given_out_again_or_of_another_container_is_another_process(written, monkeypatch):
    own = read(written).process()
    assert own.pid == os.getpid()
    later = process.Process(own.pid, own.parent, own.started + 1, own.name, is_stopped=False)
    monkeypatch.setattr(process, "find", lambda pid: later)
    assert read(written).process() is None
    monkeypatch.setattr(process, "pid_namespace", lambda: 1)
    with pytest.raises(LookupError, match="another container"):
        read(written).process()


def test_a_forked_child_writes_nothing_into_its_parents_file(tmp_path):
    program = (
        "import os, sys; from mpistrat.watch.recorder import recorder; from mpistrat.watch.record import RankFile\n"
        "mine = recorder(); path = mine.path; enter = mine.enter; index = mine.intern('b')\n"
        "if os.fork() == 0:\n"
        "    enter(0, 1, index); mine.close(); os._exit(0)\n"
        "os.wait(); assert RankFile.open(path).calls() == []\n"
        "enter(0, 2, index); print(RankFile.open(path).last().number); mine.close(); print(path.parent.exists())"
    )
    done = python(program)
    assert done.stdout.split() == ["2", "False"], done.stderr


def test_a_process_that_a_rank_starts_does_not_take_its_file():
    program = (
        "import subprocess, sys; from mpistrat.watch.recorder import recorder; mine = recorder()\n"
        "print(mine.path and mine.path.name)\n"
        "if len(sys.argv) == 1: subprocess.run([sys.executable, '-c', sys.orig_argv[3], 'child'], check=True)\n"
        "print(mine.path and mine.path.exists()); mine.close()"
    )
    variables = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": f"test-{os.getpid()}"}
    done = python(program, options=["-u"], **variables)
    names = done.stdout.split()
    assert names == ["rank-1", "None", "None", "True"], done.stderr


@pytest.mark.parametrize(("end", "is_kept"), [("", False), ("1 // 0", True)])
def test_only_a_program_that_fails_leaves_its_record(end, is_kept):
    program = f"from mpistrat.watch.recorder import recorder; print(recorder().path); {end}"
    done = python(program)
    record = Path(done.stdout.strip())
    assert (record.name, record.exists(), record.parent.exists()) == ("rank-0", is_kept, is_kept), done.stderr
    records.remove_record(record)


def test_a_program_ends_beside_a_damaged_record(tmp_path):
    mine = FlightRecorder(records.make_job(tmp_path / "base", "job") / "rank-0")
    (tmp_path / "base" / "job" / "rank-1").touch()
    mine.close()
    assert mine.path is None


def test_ranks_of_one_launcher_agree_on_the_name_of_their_job_and_a_batch_script_is_no_rank():
    program = (
        "import os, subprocess, sys\n"
        "script = 'from mpistrat.watch.record import job_name; print(job_name())'\n"
        "for rank in '01':\n"
        "    environ = {**os.environ, 'PMI_RANK': rank, 'PMI_SIZE': '2', 'MPI_LOCALRANKID': rank}\n"
        "    shell = [] if rank == '0' else ['sh', '-c', 'exec_by=sh; \"$@\"; true', 'sh']\n"
        "    subprocess.run([*shell, sys.executable, '-c', script], env=environ, check=True)\n"
    )
    names = []
    for _ in range(2):
        done = python(program, options=["-u"])
        first, second = done.stdout.split()
        assert first == second, done.stderr
        names.append(first)
    assert names[0] != names[1]
    batch = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(2**32 - 5), "SLURM_PROCID": "0"}
    assert records.job_name(batch).startswith(f"process-{os.getpid()}-")
    assert records.job_name(batch | {"SLURM_STEP_ID": "0"}).startswith("slurm-7.0")


@pytest.mark.parametrize("spoil", ["mode", "link"])
def test_a_folder_that_others_have_a_hand_in_is_refused(tmp_path, spoil):
    base = tmp_path / "base"
    if spoil == "mode":
        base.mkdir(mode=0o755)
    else:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not a private folder of this user"):
        records.make_job(base, "job")


def test_the_files_are_the_users_alone(tmp_path):
    made = FlightRecorder(records.make_job(tmp_path / "base", "job") / "rank-0")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (made.path, made.path.parent, tmp_path / "base")]
    assert modes == [0o600, 0o700, 0o700]
    made.close()
    assert list((tmp_path / "base").iterdir()) == []


def left_behind(base, name, hours):
    """Make what a job leaves whose process was killed so long ago."""
    made = FlightRecorder(records.make_job(base, name) / "rank-0")
    made._header["started"] = 1
    os.utime(made.path.parent, (time.time() - hours * 3600,) * 2)
    return made.path.parent


def test_what_jobs_left_a_day_ago_is_removed_unless_they_run(tmp_path):
    for name, hours in (("old", 25), ("new", 23), ("running", 25)):
        job = left_behind(tmp_path / "base", name, hours)
    running = FlightRecorder(job / "rank-0")
    os.utime(job, (time.time() - 25 * 3600,) * 2)
    records.remove_old_jobs(tmp_path / "base")
    assert sorted(path.name for path in (tmp_path / "base").iterdir()) == ["new", "running"]
    running.close()


def test_notices_keep_no_folder(tmp_path, monkeypatch):
    ended = FlightRecorder(records.make_job(tmp_path / "base", "ended") / "rank-0")
    Notices(ended.path.parent).post(Notice(0, 7, "they wait for each other", True))
    ended.close()
    assert list((tmp_path / "base").iterdir()) == []
    monkeypatch.setattr(records, "KEEP_BYTES", RECORD.itemsize)
    for hours in (1, 2, 25):
        killed = left_behind(tmp_path / "base", f"{hours} hours ago", hours)
        Notices(killed).post(Notice(0, 7, "they wait for each other", True))
        os.utime(killed, (time.time() - hours * 3600,) * 2)
    records.remove_old_jobs(tmp_path / "base")
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["1 hours ago"]


@pytest.mark.parametrize(("hours", "is_running"), [(0, True), (23, True), (25, False), (-1, False)])
def test_a_record_of_another_container_is_kept_for_a_day(tmp_path, monkeypatch, hours, is_running):
    own = FlightRecorder(tmp_path / "rank-0")
    own._header["namespace"] = 1
    own._header["looked"] = 10**15
    monkeypatch.setattr(time, "monotonic_ns", lambda: 10**15 + hours * 3600 * 10**9)
    assert records.has_owner(tmp_path / "rank-0") is is_running
    own.close()


def test_folders_of_jobs_come_the_last_one_first_and_one_that_has_just_ended_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "bases", lambda: [tmp_path / "one", tmp_path / "other", tmp_path / "missing"])
    for age, place in enumerate(("other/b", "one/a", "other/c")):
        (tmp_path / place).parent.mkdir(mode=0o700, exist_ok=True)
        (tmp_path / place).mkdir()
        os.utime(tmp_path / place, (1000 - age,) * 2)
    (tmp_path / "one/link").symlink_to(tmp_path / "other/b")
    assert [f"{path.relative_to(tmp_path)}" for path in records.job_folders()] == ["other/b", "one/a", "other/c"]
    monkeypatch.setattr(records, "job_folders", lambda: [tmp_path / "has just ended"])
    assert records.mark_killed(1) is None


def test_a_record_of_another_version_has_an_owner(tmp_path):
    own = FlightRecorder(tmp_path / "rank-0")
    own._header["version"] -= 1
    assert records.has_owner(tmp_path / "rank-0")
    own.close()


def test_without_room_for_the_file_there_is_none(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        FlightRecorder(tmp_path / "rank-0")
    assert list(tmp_path.iterdir()) == []
    alone = FlightRecorder(None)
    alone.leave(alone.enter(0, 1, call(alone)))


@pytest.mark.parametrize("words", [{"size": 2**40}, {"rank": 2**40}, {"rank": 3, "size": 2}, {"size": 0}, {"state": 77}])
def test_a_damaged_record_or_another_file_is_not_read(written, tmp_path, words):
    for field, value in words.items():
        written._header[field] = value
    with pytest.raises(ValueError, match="a damaged record"):
        read(written)
    (tmp_path / "rank-0").write_bytes(bytes(RECORD.itemsize))
    with pytest.raises(ValueError, match="not the record of a rank"):
        RankFile.open(tmp_path / "rank-0")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="looking at a frame collects no garbage there")
@pytest.mark.parametrize("change", [gc.enable, gc.disable])
def test_no_garbage_is_collected_while_frames_are_looked_at(change):
    change()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is (change is gc.enable)
    finally:
        gc.enable()


@pytest.mark.parametrize("is_collecting", [True, False])
def test_a_child_that_is_forked_while_frames_are_looked_at_is_not_held_up(is_collecting):
    program = (
        "import gc, os, sys; from mpistrat.watch.recorder import collection_paused, recorder\n"
        f"mine = recorder(); is_collecting = {is_collecting}; gc.enable() if is_collecting else gc.disable()\n"
        "with collection_paused(), mine._lines._lock, mine._calls._lock:\n"
        "    if not (child := os.fork()):\n"
        "        can_record = mine._lines._lock.acquire(timeout=5) and mine._calls._lock.acquire(timeout=5)\n"
        "        os._exit(0 if can_record and gc.isenabled() is is_collecting else 1)\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = python(program)
    assert (done.returncode, done.stderr) == (0, "")
