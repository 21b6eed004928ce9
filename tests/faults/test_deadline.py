"""One rank never comes to a collective: under a deadline the whole job ends, and says whom it waited for."""

from __future__ import annotations

import socket

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
        os.kill(os.getpid(), signal.SIGSTOP)
    strategy.run(step)
"""


def test_a_rank_that_is_stopped_ends_the_job(job: Job) -> None:
    ended = job(2, PROGRAM, MPISTRAT_TIMEOUT_SECONDS=str(DEADLINE_SECONDS))
    assert ended.code != 0
    assert ended.seconds < LIMIT_SECONDS
    assert "DeadlineExceededError: rank " in ended.marked[-1]
    assert f"did not end within {DEADLINE_SECONDS:g} s; not all ranks have arrived: missing rank 1 ({HOST})" in ended.marked[-1]
    assert not ended.leftovers()
