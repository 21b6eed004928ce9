"""Jobs with parameter servers that must end: chiefs, workers and servers that leave, raise, hang or are killed."""

import re

import pytest

from tests.faults.jobs import with_servers
from tests.processes import patient


def program(chief):
    """Return the program of a job, of which the chief has a variable and does what is passed."""
    return with_servers(f"with strategy.scope():\n    number = mpistrat.Variable(1.0)\n{chief}\n")


@pytest.mark.parametrize(
    ("chief", "code", "said", "survive"),
    [
        ("note_fault(); raise KeyError('of the chief')", 1, "KeyError: 'of the chief'", True),
        ("coordinator.schedule(time.sleep, (1000,)); note_fault(); sys.exit(4)", 4, "", True),
        ("note_fault(); coordinator.schedule(lambda: 1 // 0).fetch()", 1, "ZeroDivisionError", False),
        ("note_fault(); strategy.extended.update(number, lambda variable: sys.exit(6))", 6, "", True),
    ],
)
def test_what_goes_wrong_ends_the_job(job, chief, code, said, survive):
    ended = job(3, program(f"coordinator.schedule(abs, (-1,)).fetch()\n{chief}"), survive=survive)
    ended.check(code)
    assert said in ended.stderr
    assert "UnavailableError" not in ended.stderr


def test_an_error_of_the_chief_does_not_wait_for_a_function_that_runs(job):
    text = """
        def main(coordinator):
            coordinator.schedule(time.sleep, (1000,))
            time.sleep(0.5)
            note_fault()
            raise KeyError('of the chief')

        mpistrat.experimental.ParameterServerStrategy.main(main)
    """
    ended = job(3, text)
    ended.check(1)
    assert "KeyError: 'of the chief'" in ended.stderr


def test_a_chief_that_raises_without_the_hooks_ends_the_servers(job):
    ended = job(3, program("note_fault(); raise KeyError('of the chief')"), MPISTRAT_ABORT="0")
    assert "KeyError: 'of the chief'" in ended.stderr
    assert (ended.stdout.count("served worker"), ended.stdout.count("served ps")) == (1, 1)
    assert not ended.leftovers


SIGNALS = {
    "a server": "os.kill(pids[1], 9)\ncoordinator.join()",
    "a worker": "os.kill(pids[2], 9)\ncoordinator.join()",
    "all ranks": "[os.kill(pid, signal.SIGTERM) for pid in pids[::-1]]\ntime.sleep(1000)",
}


@pytest.mark.parametrize("to", SIGNALS)
def test_a_signal_that_nobody_waits_for_ends_the_job(job, to):
    limit = patient(5.0)
    ended = job(3, program(f"coordinator.schedule(time.sleep, (1000,)); note_fault(); {SIGNALS[to]}"))
    assert ended.code != 0
    assert ended.seconds < limit
    assert not ended.leftovers


def test_a_chief_that_is_told_to_end_saves_when_all_ranks_are_told(job):
    chief = """
with strategy.scope():
    checkpoint = mpistrat.Checkpoint(number=number)
handler = mpistrat.experimental.PreemptionCheckpointHandler(None, checkpoint, "checkpoints")
def terminated():
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(10,))
    child.start()
    time.sleep(0.5)  # Python forgets signals that come while it forks
    child.terminate()
    child.join()
    return child.exitcode
assert coordinator.schedule(terminated).fetch() == -signal.SIGTERM
coordinator.schedule(number.assign, (2.0,))
note_fault()
for pid in pids[::-1]:
    os.kill(pid, signal.SIGTERM)
coordinator.join()
handler.run(time.sleep, 0.2)
"""
    ended = job(3, program(chief))
    ended.check(42)
    assert "after step 1, which is saved: rank 0 has received SIGTERM" in ended.stderr


def test_a_huge_result_arrives_and_one_that_fits_no_memory_raises(job):
    chief = "print(len(coordinator.schedule(bytes, (100_000_000,)).fetch()), flush=True)\n"
    chief += "note_fault(); coordinator.schedule(bytes, (1 << 60,))\ncoordinator.join()"
    ended = job(3, program(chief), MPISTRAT_MAX_MESSAGE_BYTES="1048576")
    ended.check(1)
    assert ended.stdout == "100000000\n"
    assert "[worker 0 (rank 2 on " in ended.stderr
    assert "MemoryError" in ended.stderr


def test_a_stall_report_tells_what_each_task_does(job):
    chief = """
def slow(variable): time.sleep(2)
def step(): mpistrat.get_strategy().extended.update(number, slow)
coordinator.schedule(step)
coordinator.join()
"""
    ended = job(3, program(chief), MPISTRAT_STALL_SECONDS="1")
    assert ended.code == 0, ended.stderr
    _, _, report = ended.stderr.partition("chief 0 (rank 0 on ")
    assert "has waited 1 s for the scheduled functions; 1 are at worker 0 (rank 2 on " in report
    assert re.search(r"meanwhile: rank 1 \(.*\): alive; ps 0 runs slow on Variable; now at .*\(slow\)", report), report
    waits = r"worker 0 runs step \(function 0\), waits for an answer of ps 0 \(rank 1 on .*\): call of slow of Variable"
    assert re.search(rf"meanwhile: rank 2 \(.*\): alive; {waits}; now at .*\(step\)", report), report


def test_an_idle_server_leaves_its_core_to_others_and_ends_with_the_chief(job):
    busy = "print('busy', resolver.task_type, time.process_time() - began, flush=True)\n"
    chief = "time.sleep(1.5)\nfor _ in range(100): coordinator.schedule(time.sleep, (0.01,))\n"
    text = program(chief).replace("resolver = ", "began = time.process_time()\nresolver = ", 1)
    ended = job(3, text.replace("    sys.exit()\n", f"    {busy}    sys.exit()\n") + busy)
    ended.check(0)
    seconds = {words[1]: float(words[2]) for line in ended.stdout.splitlines() if (words := line.split())[0] == "busy"}
    assert set(seconds) == {"chief", "ps", "worker"}
    assert max(seconds["ps"], seconds["worker"]) < 0.45, "of one and a half seconds"


def test_modules_are_found_by_the_workers(job):
    text = """
        from mpistrat.experimental import ParameterServerStrategy

        class Point:
            def __init__(self, x):
                self.x = x

        def moved(point):
            return Point(point.x + STEP)

        STEP = 2

        def chief(coordinator):
            print(coordinator.schedule(moved, (Point(3),)).fetch().x)

        ParameterServerStrategy.main(chief)
    """
    ended = job(3, text)
    assert (ended.code, ended.stdout) == (0, "5\n"), ended.stderr
