"""One rank never comes to a collective: under a deadline the whole job ends, and says whom it waited for."""

from __future__ import annotations

import socket

import pytest

from tests.faults.jobs import LIMIT_SECONDS, Job

HOST = socket.gethostname()
DEADLINE_SECONDS = 1.5  # starting takes up to a second on busy cores

PROGRAM = """
    import numpy as np
    import mpistrat

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    step = lambda: mpistrat.get_replica_context().all_reduce("sum", np.ones(3))
    strategy.run(step)
    mine.Barrier()
    if comm.rank == 1:
        note_fault()
        {fault}
    strategy.run(step)
"""


@pytest.mark.parametrize(
    ("fault", "strict"),
    [("time.sleep(1000)", "0"), ("time.sleep(1000)", "1"), ("os.kill(os.getpid(), signal.SIGSTOP)", "0")],
    ids=["asleep", "asleep, calls compared", "stopped"],
)
def test_a_rank_that_never_comes_ends_the_job(job: Job, fault: str, strict: str) -> None:
    deadline = {"MPISTRAT_TIMEOUT_SECONDS": str(DEADLINE_SECONDS), "MPISTRAT_STRICT": strict}
    ended = job(2, PROGRAM.format(fault=fault), **deadline)
    assert ended.code != 0
    assert ended.seconds < LIMIT_SECONDS
    assert "DeadlineExceededError: rank " in ended.marked[-1]
    assert f"did not end within {DEADLINE_SECONDS:g} s; not all ranks have arrived: missing rank 1 ({HOST})" in ended.marked[-1]
    assert not ended.leftovers()


STARTED = """
    import numpy as np
    import mpistrat
    from mpistrat.experimental import CommunicationOptions

    strategy = mpistrat.MultiWorkerMirroredStrategy()
    options = CommunicationOptions(timeout_seconds=0.5)

    def started():
        mpistrat.get_replica_context().start_all_reduce("sum", np.ones(3), options).wait()

    strategy.run(started)
    if comm.rank == 1:
        time.sleep(2.5)
    strategy.close()
    print("done")
"""


def test_the_deadline_of_what_was_started_ends_with_it(job: Job) -> None:
    ended = job(2, STARTED)
    assert (ended.code, ended.stdout.split()) == (0, ["done"] * 2), ended.stderr
