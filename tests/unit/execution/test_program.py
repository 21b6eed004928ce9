"""Programs that run: lanes and steps, to the end or to a deadline; their timeline; and the memory that they hold."""

import gc
import json
import os
import platform
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, islice, repeat
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat
from mpistrat import arrays
from mpistrat.arrays import new_array, retained_bytes
from mpistrat.errors import DeadlineExceededError
from mpistrat.execution.compile import interleave, overlap
from mpistrat.steps import WAITING, WORKED, drive
from mpistrat.timeline import Timeline, TimelineEvent, write_chrome_trace
from tests.processes import python


def nothing(_):
    return iter(())


def play(num_chunks, depth, max_in_flight, seed):
    """Run chunks whose steps wait at random; return what began and ended."""
    random_steps = random.Random(seed)
    log = []

    def part(name):
        def steps(chunk):
            log.append((name, chunk, "begins"))
            for _ in range(random_steps.randrange(4)):
                yield random_steps.random() < 0.5
            log.append((name, chunk, "ends"))

        return steps

    for _ in overlap(part("head"), part("middle"), part("tail"), num_chunks, depth, max_in_flight):
        pass
    return log


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 5), st.integers())
def test_order_and_depth(num_chunks, depth, max_in_flight, seed):
    log = play(num_chunks, depth, max_in_flight, seed)
    at = {event: position for position, event in enumerate(log)}
    assert len(log) == len(at) == 6 * num_chunks, "everything, once"
    for chunk in range(num_chunks):
        assert at["head", chunk, "ends"] < at["middle", chunk, "begins"]
        assert at["middle", chunk, "ends"] < at["tail", chunk, "begins"]
        if chunk >= depth:
            assert at["tail", chunk - depth, "ends"] < at["head", chunk, "begins"], "no more than depth under way"
    middles = [(chunk, what) for name, chunk, what in log if name == "middle"]
    assert [chunk for chunk, what in middles if what == "begins"] == list(range(num_chunks)), "they begin in order"
    balance = list(accumulate(1 if what == "begins" else -1 for _, what in middles))
    assert max(balance) <= max_in_flight


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 5), st.tuples(st.integers(), st.integers()))
def test_the_order_of_a_lane_depends_on_indexes_only(num_chunks, depth, max_in_flight, seeds):
    logs = [play(num_chunks, depth, max_in_flight, seed) for seed in seeds]
    intra, inter = ([[event for event in log if (event[0] == "middle") == middle] for log in logs] for middle in (False, True))
    assert intra[0] == intra[1]
    assert max_in_flight > 1 or inter[0] == inter[1]


def test_the_order_that_is_documented():
    log = play(4, 2, 1, 0)
    intra = [f"{name} {chunk}" for name, chunk, what in log if what == "begins" and name != "middle"]
    assert intra == ["head 0", "head 1", "tail 0", "head 2", "tail 1", "head 3", "tail 2", "tail 3"]


def test_a_wait_of_one_lane_does_not_stop_the_other():
    released: list[int] = []

    def middle(chunk):
        while chunk not in released:
            yield WAITING

    entered: list[int] = []

    def head(chunk):
        entered.append(chunk)
        yield WORKED

    steps = overlap(head, middle, nothing, 3, 3, 1)
    # all heads come through while the middle of chunk 0 waits; then everybody waits, and says so
    found = list(islice(steps, 50))
    assert entered == [0, 1, 2]
    assert found[-10:] == [WAITING] * 10
    released += [0, 1, 2]
    assert WAITING in [WAITING, *steps]


def test_several_middles_are_in_flight_and_a_step_worked_if_either_lane_did():
    entered: list[int] = []

    def middle(chunk):
        entered.append(chunk)
        while len(entered) < 3:
            yield WAITING  # none ends before the third has begun

    assert WORKED in list(overlap(lambda chunk: iter([WORKED]), middle, nothing, 3, 3, 3))
    assert entered == [0, 1, 2]
    found = list(overlap(nothing, lambda chunk: iter([WAITING] * 5), nothing, 2, 1, 1))
    assert found.count(WAITING) >= 4
    assert found[0] is WORKED, "the middle has begun"


def test_a_lane_that_waits_does_not_stop_the_others():
    met: list[str] = []

    def lane(name, peer):
        met.append(name)
        while peer not in met:
            yield WAITING

    found = list(interleave([lane("first", "second"), iter([]), lane("second", "first")]))
    assert met == ["first", "second"]
    assert found == [WAITING, WAITING], "the first learns of the second one turn later"
    assert list(interleave([])) == []
    assert list(interleave([iter([WAITING, WORKED]), iter([WAITING])])) == [WAITING, WORKED, WAITING]


def test_steps_are_driven_to_the_end_or_an_error_and_not_late_while_they_work():
    seen: list[int] = []

    def steps():
        for index in range(1000):
            seen.append(index)
            yield WORKED if index % 3 else WAITING
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        drive(steps(), lambda: "this")
    assert seen == list(range(1000))

    def steps():
        for _ in range(3):
            time.sleep(0.005)
            yield WORKED

    drive(steps(), lambda: "slow work", 0.001, back_off=lambda _: None)  # which looks at the clock at each wait


def test_a_deadline_ends_waiting_and_names_what_was_waited_for_or_what_is_overdue():
    started = time.monotonic()
    message = r"all_reduce\(SUM\) did not end within 0\.02 s; not all ranks have arrived"
    with pytest.raises(DeadlineExceededError, match=message) as caught:
        drive(repeat(WAITING), lambda: "all_reduce(SUM)", 0.02)
    assert 0.02 <= time.monotonic() - started < 5
    assert isinstance(caught.value, TimeoutError)
    overdue = DeadlineExceededError("rank 3 does not answer")
    with pytest.raises(DeadlineExceededError, match="^rank 3 does not answer$"):
        drive(repeat(WAITING), lambda: "this", 0.01, lambda: overdue)


def test_who_drives_may_say_how_to_rest():
    rests: list[int] = []
    steps = [WAITING, WAITING, WORKED, WAITING, WORKED, WORKED, WAITING]
    drive(iter(steps), lambda: "this", back_off=rests.append)
    assert rests == [0, 1, 0, 0], "how often in a row there was nothing to do"
    with pytest.raises(DeadlineExceededError):  # who rests long looks at the clock each time
        drive(iter([WAITING] * 3), lambda: "this", 0.01, back_off=lambda _: time.sleep(0.02))


def test_who_waits_on_a_busy_machine_yields_never_sleeps_and_looks_in_time_for_what_ends_the_wait(monkeypatch):
    def verdict():
        raise RuntimeError("a verdict")

    monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(0.01))  # as if other processes had run
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="a verdict"):
        drive(repeat(WAITING), lambda: "this", check=verdict)
    assert time.monotonic() - started < 1
    yields: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(os, "sched_yield", lambda: (sleep(1e-3), yields.append(1)))  # as if another process had run
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"slept for {seconds} s"))
    drive(iter([WAITING] * 5 + [WORKED]), lambda: "a wait")
    assert len(yields) == 5


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


def test_a_trace_has_a_process_per_rank_and_a_named_row_per_lane(tmp_path):
    # both ranks did the same thing at the same time, on clocks with different origins
    events = TimelineEvent("sum", "intra", 1.0, 1.5, 64), TimelineEvent("ring", "inter", 1.5, 2.0, 32)
    first = timeline(*events, epoch_seconds=100.0)
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
    for empty in ({}, {0: Timeline()}):
        write_chrome_trace(tmp_path / "trace.json", empty)
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


_PROGRAM = """
import ctypes
import numpy as np
from mpi4py import MPI
import mpistrat

mpistrat.Communicator(MPI.COMM_SELF)
# more than compiling modules, where no bytecode is kept, leaves at the top of the heap
arrays = np.ones(1 << 20), np.ones(1 << 20)  # a result that is new, and a buffer inside the call
# glibc writes the size of a block before it, and in its second bit whether the system has given it, and gets it back
print(*[ctypes.c_size_t.from_address(array.ctypes.data - 8).value >> 1 & 1 for array in arrays])
"""


def test_a_report_adds_up_and_is_one_line_and_one_replica_holds_nothing():
    report = mpistrat.MemoryReport(3, 8 << 20, 1 << 20, 1 << 20, 2, 4 << 20)
    assert (report.total_bytes, report.ratio) == (10 << 20, 2.5)
    told = "rank 3 holds 10 MiB: window 8 MiB, rails 1 MiB, plans 1 MiB (2 plans); 2.5 times its largest pack of 4 MiB"
    assert str(report) == told
    with pytest.raises(AttributeError):
        report.rank = 4
    strategy = mpistrat.OneDeviceStrategy()
    report = strategy.memory_report()
    assert (report.total_bytes, report.ratio, report.rank) == (0, 0.0, 0)
    strategy.close()
    with pytest.raises(RuntimeError, match="this strategy was closed"):
        strategy.memory_report()


def test_large_arrays_take_the_memory_of_earlier_ones_that_nobody_has():
    float32, bfloat16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
    first = new_array((9 << 20,), float32)
    assert (first.shape, first.dtype, first.flags.carray) == ((9 << 20,), float32, True)
    address, before = first.ctypes.data, retained_bytes()
    views = [first[5:], first.data, np.from_dlpack(first), first.reshape(2, -1).T]
    del first
    while views:  # each of them has the memory
        assert new_array((9 << 20,), float32).ctypes.data != address
        views.pop()
    assert retained_bytes() == before + (72 << 20)
    again = [new_array((2, 9 << 20), bfloat16), new_array((2, 9 << 20), bfloat16)]
    assert address in [array.ctypes.data for array in again]
    assert {array.dtype for array in again} == {bfloat16}
    assert again[0].ctypes.data != again[1].ctypes.data
    assert retained_bytes() == before


def test_no_more_than_256_mib_are_retained():
    arrays = [new_array((48 << 20,), np.dtype(np.uint8)) for _ in range(8)]
    assert len({array.ctypes.data for array in arrays}) == 8
    large = new_array((257 << 20,), np.dtype(np.uint8))
    del arrays, large
    assert retained_bytes() == 5 * 48 << 20


def test_threads_finalizers_and_a_lack_of_memory_disturb_nothing(monkeypatch):
    monkeypatch.setattr(arrays, "MALLOC_REUSES_BYTES", 0)
    monkeypatch.setattr(arrays, "_MOST_RETAINED_BYTES", 40 << 10)
    uint8, interval, thresholds = np.dtype(np.uint8), sys.getswitchinterval(), gc.get_threshold()

    def make(number):
        for count in range(1, 300):
            nest = [new_array((1000 + number * count % 50,), uint8)]
            nest.append(nest)  # which the collector finds, perhaps while another array is made
            del nest
            new_array((2000,), uint8)

    try:
        sys.setswitchinterval(1e-6)
        gc.set_threshold(7)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(make, range(8)))
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
    monkeypatch.setattr(np, "empty", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        new_array((3000,), uint8)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")
@pytest.mark.parametrize(("own", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_new_arrays_take_memory_that_was_freed_unless_malloc_is_set_otherwise(own, is_kept):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env={**environment, **own})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["0", "0"] if is_kept else ["1", "1"])
