"""One rank fails, the others wait for it in a collective: the whole job ends, soon, and one traceback says why."""

import socket
import sys
from collections.abc import Callable

import pytest

from tests.faults.jobs import LIMIT_SECONDS, Ended
from tests.processes import codes_after_loss

Job = Callable[..., Ended]

HOST = socket.gethostname()
RUNNER = (sys.executable, "-m", "mpi4py")  # what mpistrat run puts before a script

FAIL_ON_RANK_1 = """
    if comm.rank == 1:
        note_fault()
        {fault}
    mine.Barrier()
"""


@pytest.mark.parametrize("python", [(sys.executable,), RUNNER], ids=["python", "python -m mpi4py"])
def test_exception_ends_the_job_with_one_traceback(job: Job, python: tuple[str, ...]) -> None:
    ended = job(2, FAIL_ON_RANK_1.format(fault="raise ValueError('a bad batch\\nin two lines')"), python)
    ended.check(1)
    # from the script on: no frame of a runner, and every line says whose it is
    assert ended.marked[0] == f"[rank 1 on {HOST}] Traceback (most recent call last):"
    assert 'job.py", line ' in ended.marked[1]
    assert ended.marked[-2:] == [f"[rank 1 on {HOST}] ValueError: a bad batch", f"[rank 1 on {HOST}] in two lines"]
    assert ended.stderr.count("Traceback") == 1


def test_exception_of_another_thread_ends_the_job(job: Job) -> None:
    fault = "threading.Thread(target=lambda: 1 // 0, name='loader').start(); mine.Recv(bytearray(1), source=0)"
    ended = job(2, FAIL_ON_RANK_1.format(fault=fault))
    ended.check(1)
    assert ended.marked[0] == f"[rank 1 on {HOST}, thread loader] Traceback (most recent call last):"
    assert "ZeroDivisionError: " in ended.marked[-1]
    assert ended.stderr.count("Traceback") == 1


def test_bug_on_every_rank_is_told_once(job: Job) -> None:
    ended = job(2, "note_fault()\nraise KeyError('weights')")
    ended.check(1)
    assert ended.marked[-1] == f"[rank 0 on {HOST}] KeyError: 'weights'"
    assert ended.stderr.count("Traceback") == 1


def test_error_raised_everywhere_is_told_by_rank_0_even_when_it_is_late(job: Job) -> None:
    program = """
        from mpistrat.errors import AgreementError
        note_fault()
        time.sleep(1.2 if comm.rank == 0 else 0)
        raise AgreementError("ranks passed different dtypes")
    """
    ended = job(2, program)
    ended.check(1)
    assert ended.marked[-1] == f"[rank 0 on {HOST}] mpistrat.errors.AgreementError: ranks passed different dtypes"
    assert ended.stderr.count("Traceback") == 1


def test_error_raised_everywhere_but_on_rank_0_is_told_all_the_same(job: Job) -> None:
    fault = "from mpistrat.errors import AgreementError; raise AgreementError('alone')"
    ended = job(2, FAIL_ON_RANK_1.format(fault=fault))
    ended.check(1)
    assert ended.marked[-1] == f"[rank 1 on {HOST}] mpistrat.errors.AgreementError: alone"


@pytest.mark.parametrize(
    ("fault", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)], ids=["_exit", "SIGKILL"]
)
def test_rank_that_vanishes_ends_the_job(job: Job, fault: str, code: int) -> None:
    ended = job(2, FAIL_ON_RANK_1.format(fault=fault))
    assert ended.code in codes_after_loss(code)
    assert ended.seconds < LIMIT_SECONDS
    assert not ended.leftovers()


@pytest.mark.parametrize(("num_ranks", "abort"), [(2, "0"), (1, "1")], ids=["switched off", "one rank alone"])
def test_where_no_other_rank_is_to_be_ended_the_hooks_are_those_of_python(job: Job, num_ranks: int, abort: str) -> None:
    program = "sys.exit(sys.excepthook is not sys.__excepthook__ or threading.excepthook is not threading.__excepthook__)"
    assert job(num_ranks, program, RUNNER, MPISTRAT_ABORT=abort).code == 0
