"""Programs that compete in a lab: who is measured gave right sums over the links, and who cannot compete is named."""

import sys
from pathlib import Path

import pytest

from tests.benchmarks.contest import Contender, Contest, ContestError

_PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"
_MPI = Contender("MPI", "openmpi", [sys.executable, str(_PEERS / "mpi_ranks.py")])
_LIAR = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from turns import Task, serve
rank, runs = int(os.environ["CONTEST_RANK"]), []
def slow_on_rank_0():
    runs.append(time.sleep(0.6 * (rank == 0)))
tasks = {
    "all_reduce": lambda request: Task(lambda: None, lambda: False, lambda: None),
    "nothing": lambda request: Task(lambda: None, lambda: True, lambda: None),
    "uneven": lambda request: Task(slow_on_rank_0, lambda: True, lambda: None),
}
serve(rank, {"liar": "1"}, tasks, {"rank": lambda: rank, "runs": lambda: len(runs)})
"""


@pytest.fixture(scope="module")
def contest(lab):
    """Give three programs on two hosts, one of which cannot be started."""
    liar = Contender("liar", "plain", [sys.executable, "-c", _LIAR, str(_PEERS)])
    broken = Contender("broken", "plain", [sys.executable, "-c", "raise SystemExit('no such library')"])
    with Contest(lab, 2, "1+1+0+0", [_MPI, liar, broken]) as programs:
        yield programs


def test_who_cannot_start_is_left_out_with_what_it_said(contest):
    assert contest.names == ["MPI", "liar"]
    assert "no such library" in contest.missing["broken"]
    assert contest.versions["liar"] == "1"


def test_what_is_measured_was_right_and_went_over_the_links(contest):
    done = contest.alternate({"MPI": ("MPI", {"kind": "all_reduce", "nbytes": 1 << 20})}, seconds=0.05)["MPI"]
    assert done.seconds > 0
    assert 1.0 <= done.sent_share < 1.5


def test_a_wrong_sum_or_bytes_that_went_round_the_links_are_no_result(contest):
    with pytest.raises(ContestError, match="liar gave a wrong result for"):
        contest.alternate({"liar": ("liar", {"kind": "all_reduce", "nbytes": 8})}, seconds=0.01)
    with pytest.raises(ContestError, match=r"liar sent 0\.\d\d of the bytes that it must for .*: some went round the links"):
        contest.alternate({"liar": ("liar", {"kind": "nothing", "nbytes": 1 << 20})}, seconds=0.01)


def test_calls_are_answered_in_the_order_of_the_ranks_which_repeat_a_task_equally_often(contest):
    assert contest.call("liar", "rank") == [0, 1]
    contest.alternate({"liar": ("liar", {"kind": "uneven"})}, seconds=0.01)
    first, second = contest.call("liar", "runs")
    assert first == second > 1


def test_a_program_that_fails_says_why(contest):
    with pytest.raises(ContestError, match=r"(?s)MPI failed with .*KeyError: 'dance'"):
        contest.alternate({"MPI": ("MPI", {"kind": "dance"})}, seconds=0.01)
