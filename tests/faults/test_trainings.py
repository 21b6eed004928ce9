"""Trainings that are disturbed, a slice of ``python -m tests.faults.trainings``, and what `mpistrat run` says of their ends."""

import os
import socket
from collections import Counter

import mpistrat
from tests.faults.jobs import LIMIT_SECONDS, MPISTRAT_RUN, said
from tests.faults.trainings import PROGRAM, Training, disturb, undisturbed
from tests.processes import run_bounded

HOST = socket.gethostname()

# an attempt each: a rank is killed, one does not come to a collective, one raises, one wants to go on elsewhere
FAULTS = """time.sleep(0.4 * (state["step"] in (9, 16, 23, 25)))  # what was saved before a fault is durable then
            if (attempt, rank, state["step"]) == (0, 1, 9): os.kill(os.getpid(), signal.SIGKILL)
            if (attempt, rank, state["step"]) == (1, 1, 16): time.sleep(1000)
            if (attempt, rank, state["step"]) == (2, 0, 23): raise ValueError("planted")
            if (attempt, state["step"]) == (3, 25): sys.exit(42)"""


def test_preempted_jobs_end_with_the_weights_of_an_undisturbed_one():
    counts = Counter[str]()
    wrong = list(disturb("preempt", "2+1", 2, seed=1, counts=counts, steps=200))
    assert not wrong, "\n".join(wrong)
    assert counts["preempted"]


def test_a_job_that_fails_in_every_way_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    training = Training(tmp_path, "1x2", 30, FAULTS)
    with training.restarted(4, MPISTRAT_TIMEOUT_SECONDS="2") as process:
        assert process.wait(LIMIT_SECONDS) == 0, said(tmp_path)
    *begun, result = said(tmp_path, "out").splitlines()
    assert begun == [f"attempt {number} begins at step {step}" for number, step in enumerate((0, 7, 14, 21, 21))]
    killed, hung, raised, preempted = training.restarts()
    assert killed.startswith(f"restart 1 of 4: rank 1 on {HOST} (process ")
    assert killed.endswith(") was ended by signal 9; the last checkpoint is that of step 7")
    assert hung == f"restart 2 of 4: rank 0 on {HOST} ended with code 1; the last checkpoint is that of step 14"
    assert raised == f"restart 3 of 4: rank 0 on {HOST} ended with code 1; the last checkpoint is that of step 21"
    assert preempted == "restart 4 of 4: the job was preempted; the last checkpoint is that of step 21"
    assert result == undisturbed(30)


def test_mpistrat_run_returns_the_code_after_one_line_of_why(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    argv = [*MPISTRAT_RUN, "-n", "2", "train.py", "1000000", "0"]
    done = run_bounded(argv, LIMIT_SECONDS, {**os.environ, "MPISTRAT_TIME_LIMIT": "0.01"}, tmp_path)
    assert (done.returncode, done.stdout) == (mpistrat.RESTART_EXIT_CODE, "attempt 0 begins at step 0\n")
    saved, stopped = done.stderr.splitlines()
    assert saved.startswith("mpistrat: step 2: ")
    assert stopped == "mpistrat: the job stops after step 2, which is saved: the time limit is near"
