"""`mpistrat run --max-restarts`: jobs that fail in every way continue from their checkpoints; those without progress stop."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.faults.restarts import Done, train

HOST = socket.gethostname()

# an attempt each: a rank is killed, one does not come to a collective, one raises, one wants to go on elsewhere
FAULTS = """if (attempt, rank, state["step"]) == (0, 1, 7): os.kill(os.getpid(), signal.SIGKILL)
        if (attempt, rank, state["step"]) == (1, 1, 12): time.sleep(1000)
        if (attempt, rank, state["step"]) == (2, 0, 17): raise ValueError("planted")
        if (attempt, state["step"]) == (3, 18): sys.exit(42)"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    done = train(tmp_path_factory.mktemp("undisturbed"), "1x2")
    assert (done.code, done.restarts) == (0, [])
    return done


def test_a_job_that_fails_in_every_way_ends_with_the_same_weights(
    tmp_path: Path, undisturbed: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPISTRAT_TIMEOUT_SECONDS", "2")
    done = train(tmp_path, "1x2", "--max-restarts", "4", fault=FAULTS)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        f"attempt {number} begins at step {step}" for number, step in enumerate((0, 5, 10, 15, 15))
    ]
    killed, hung, raised, preempted = done.restarts
    assert killed.startswith(f"restart 1 of 4: rank 1 on {HOST} (process ")
    assert killed.endswith(") was ended by signal 9; the last checkpoint is that of step 5")
    assert hung == f"restart 2 of 4: rank 0 on {HOST} ended with code 1; the last checkpoint is that of step 10"
    assert raised == f"restart 3 of 4: rank 0 on {HOST} ended with code 1; the last checkpoint is that of step 15"
    assert preempted == "restart 4 of 4: the job was preempted; the last checkpoint is that of step 15"
    assert done.weights == undisturbed.weights
