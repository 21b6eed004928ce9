"""The engine, without MPI: order, failures, handles that are dropped, forks, and the end of the program."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from mpistrat.errors import UnavailableError
from mpistrat.execution import engine, threads
from mpistrat.execution.engine import Job, Work, submit, wait_for_gpu
from tests.processes import python


def start(carry_out):
    job = Job(carry_out, lambda: "the sum")
    submit(job)
    return Work(job)


def run(program):
    """Return what a program of its own prints; it may not take long."""
    head = "import os, sys, threading, time; from mpistrat.execution.engine import Job, back_off, submit;"
    quiet = ("-W", "ignore:This process:DeprecationWarning")  # from 3.12 on Python warns of a fork beside other threads
    done = python(head + program, options=quiet)
    return done.stdout, done.stderr, done.returncode


def test_jobs_run_one_at_a_time_in_the_order_of_their_submission():
    seen, gate = [], threading.Event()

    def job(number):
        if number == 0:
            gate.wait()
        seen.append(("begin", number))
        time.sleep(0)
        seen.append(("end", number))
        return number

    works = [start(lambda number=number: job(number)) for number in range(20)]
    assert not any(work.done() for work in works)
    gate.set()
    assert [work.wait() for work in reversed(works)] == list(range(20))[::-1]
    assert seen == [(what, number) for number in range(20) for what in ("begin", "end")]


def test_what_can_be_completed_is_by_who_asks_for_it_and_what_is_late_by_the_engine():
    threads_of, results = [], [None, None, 7]

    def complete():
        threads_of.append(threading.current_thread().name)
        return results.pop(0) if results else None

    assert Work(Job(lambda: 8, lambda: "the sum", complete=complete)).wait() == 7
    assert threads_of == [threading.current_thread().name] * 3
    late = Work(Job(lambda: threading.current_thread().name, lambda: "the sum", complete=complete))
    assert not late.done()
    assert late.wait() == "mpistrat engine"
    called = threading.Event()
    Work(Job(lambda: 8, lambda: "the sum", complete=complete)).add_done_callback(called.set)
    assert called.wait(60), "nobody asks for it, and its callback is called"


def test_what_failed_fails_again_what_a_callback_raises_is_raised_by_its_work_and_later_ones_go_on():
    failing, fine = start(lambda: 1 // 0), start(lambda: 7)
    assert fine.wait() == 7
    for again in (failing.done, failing.wait, failing.wait):
        with pytest.raises(ZeroDivisionError):
            again()
    with pytest.raises(ZeroDivisionError):
        failing.then(str).wait()

    def fail():
        raise ValueError("of a callback")

    started = threading.Event()
    job = Job(lambda: started.wait(10), lambda: "a job")
    job.add_done_callback(fail)
    submit(job)
    started.set()
    with pytest.raises(ValueError, match="of a callback"):
        Work(job).wait()
    after = Job(lambda: 3, lambda: "another job")
    submit(after)
    assert Work(after).wait() == 3


def test_a_result_is_finished_once_where_the_program_waits():
    calls = []

    def finish(result):
        calls.append(threading.current_thread())
        return [result]

    work = start(lambda: 3).then(finish).then(tuple)
    assert work.wait() is work.wait()
    assert work.wait() == (3,)
    assert calls == [threading.current_thread()]
    assert Work.ended(4).then(str).wait() == "4"
    assert Work.ended(None).done()


def test_what_is_dropped_is_carried_out_and_nothing_kept():
    gate, ended, array = threading.Event(), threading.Event(), np.ones(3)
    alive = weakref.ref(array)
    start(lambda array=array: (gate.wait(), ended.set(), array))
    del array
    gc.collect()
    assert alive() is not None, "the engine keeps what it will work on"
    gate.set()
    assert ended.wait(10)
    start(lambda: None).wait()
    gc.collect()
    assert alive() is None
    job = Job(lambda: threading.Event(), lambda: "the sum", is_on_gpu=True)
    submit(job)
    job.join()
    alive = weakref.ref(job.result())
    del job
    gc.collect()
    start(lambda: None).wait()  # the engine has let go of the one before
    assert alive() is None


def test_a_rest_is_longer_each_time_but_never_long(monkeypatch):
    naps, yields = [], []
    monkeypatch.setattr(engine.time, "sleep", naps.append)
    monkeypatch.setattr(engine.os, "sched_yield", lambda: yields.append(1))
    for waits in range(1000):
        engine.back_off(waits)
    assert naps == sorted(naps)
    assert (naps[0], naps[-1]) == (0, 5e-4)
    monkeypatch.setattr(engine._engine, "num_waiting", 1)
    engine.back_off(1000)
    assert (len(naps), len(yields)) == (1000, 1), "nobody computes while the program waits"


def test_a_forked_child_is_told_that_nothing_will_come():
    program = """
from mpistrat.execution import engine, threads
engine._ALIVE_CHECK_SECONDS = 0.05
gate = threading.Event()
held = Job(gate.wait, lambda: 'the sum'); submit(held)
if os.fork() == 0:
    try: held.join()
    except Exception as error: print(type(error).__name__, error, flush=True)
    mine = Job(lambda: 5, lambda: ''); submit(mine); mine.join(); print(mine.result(), flush=True)
    sys.exit()
os.wait(); gate.set(); held.join(); print('parent', held.result())
"""
    out, err, code = run(program)
    assert (code, err) == (0, "")
    assert "UnavailableError the sum will not end: the thread that carries out what was started is gone" in out
    assert out.endswith("5\nparent True\n")


def test_at_the_end_of_the_program_what_was_started_is_finished_unless_it_ends_by_an_exception():
    out, err, code = run("submit(Job(lambda: (time.sleep(0.1), print('carried out')), lambda: ''))")
    assert (out, err, code) == ("carried out\n", "", 0)
    program = """
from mpistrat.ending import Stage, at
at(Stage.CLOSE, lambda: print('mpistrat engine' in [thread.name for thread in threading.enumerate()], job.failure))
def carry_out():
    while True: back_off(3)
job = Job(carry_out, lambda: 'the sum'); submit(job)
1 // 0
"""
    out, err, code = run(program)
    assert code == 1
    assert "ZeroDivisionError" in err
    assert out == "False the program ended by an exception before this had ended\n"


def test_who_waits_for_a_thread_that_is_gone_is_told(monkeypatch):
    monkeypatch.setattr(engine, "_ALIVE_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(engine, "_engine", engine._Engine())
    with pytest.raises(UnavailableError, match=r"the sum will not end: .* Start and wait for it in the process"):
        Work(Job(lambda: 0, lambda: "the sum")).wait()


def test_a_callback_that_waits_for_the_program_does_not_keep_it_waiting(monkeypatch):
    monkeypatch.setattr(engine, "_ALIVE_CHECK_SECONDS", 0.01)
    gate, lock, called = threading.Event(), threading.Lock(), threading.Event()

    def callback():
        if lock.acquire(timeout=20):
            called.set()

    work = start(lambda: (gate.wait(), 7)[1])
    work.add_done_callback(callback)
    with lock:
        gate.set()
        assert work.wait() == 7
    assert called.wait(20)


def test_a_call_on_the_gpu_waits_for_the_jobs_of_others_there():
    gate, ended = threading.Event(), []
    submit(Job(lambda: (gate.wait(), ended.append("there")), lambda: "the sum", owner="one", is_on_gpu=True))
    submit(Job(lambda: None, lambda: "the sum", owner="two"))
    wait_for_gpu("one")
    assert ended == []
    threading.Timer(0.1, gate.set).start()
    wait_for_gpu("two")
    assert ended == ["there"]


def test_threads_are_looked_at_whenever_the_collector_finds_others():
    before = gc.get_threshold()
    try:
        for more in range(40):  # allocations until it runs
            gc.disable()
            for _ in range(50):
                thread = threading.Thread()
                thread.itself = thread
                del thread
            gc.set_threshold(gc.get_count()[0] + more)
            gc.enable()
            assert threading.main_thread() in threads._threads()
    finally:
        gc.set_threshold(*before)
        gc.enable()
