"""Who waits for whom, when that is in vain, and in which words it is told: from states that are made up."""

import os
from dataclasses import replace

import pytest

from mpistrat.errors import AgreementError, UnavailableError
from mpistrat.launch import process
from mpistrat.watch import states as states_of
from mpistrat.watch.record import NOT_LISTED, RankFile, RecordedCall
from mpistrat.watch.recorder import FlightRecorder, hash_of
from mpistrat.watch.states import RankState, decode, encode, stall_report
from mpistrat.watch.verdict import Notice, judge, waits_for
from mpistrat.watch.watcher import Notices, Watcher
from tests.processes import python

ONE, TWO = (1, 5), (2, 5)
SUM, BARRIER = "all_reduce(SUM, [float64 (3,)])", "barrier()"


def call(key=ONE, text=SUM, left=None, **more):
    return RecordedCall(*key, text, hash_of(text), "train.py:7 (step)", 10**9 + key[0], 2.0, left, **more)


def ranks(*calls, **states):
    """Return a rank for each call, `rank1="ended"` for another state than the call says."""

    def state(rank, call):
        return states.get(f"rank{rank}", "in" if call is not None and call.left_seconds_ago is None else "out")

    def one(rank, call):
        there = (call,) if call else ()
        return RankState(rank, f"node{rank // 2}", 100 + rank, state(rank, call), there, f"data.py:{rank} (load)", 0.1)

    return [one(rank, call) for rank, call in enumerate(calls)]


def judged(states):
    finding = judge(states, {ONE, TWO, (1, 6)})
    return "" if finding is None else finding.notice.text


def also(rank, *calls):
    """Return the state of a rank that made other calls before."""
    return replace(rank, calls=(*rank.calls, *calls))


MAY_GO_ON = {
    "all are in it": ranks(call(), call(), call()),
    "one computes": ranks(call(), None, call()),
    "one is behind": ranks(call(), call((1, 4), left=1.0), None),
    "one has left": ranks(call(), call(left=0.5), call()),
    "one is stopped": ranks(call(), call(), call(), rank1="stopped"),
    "one is stopped in another one": ranks(call(ONE), call(TWO), rank1="stopped"),
    "one does not answer": ranks(call(), None, rank1="unknown"),
    "one has not begun": ranks(call(), None, rank1="absent"),
    "one took part and ended": ranks(call(), call(left=1.0), rank1="ended"),
    "one took part and was killed": ranks(call(), call(left=1.0), rank1="gone"),
    "what one called is forgotten": ranks(call(), replace(call(text=BARRIER), digest=0)),
    "what one called was started only": ranks(call(ONE, is_started=True), call(TWO)),
    "what one has started waits for one that computes": ranks(call(ONE, is_started=True), None, call(ONE), rank2="killed"),
    "another thread of one may come": [replace(ranks(call(ONE))[0], has_threads=True), ranks(None, call(TWO))[1]],
    "they wait for one that computes": [also(ranks(call(TWO))[0], call(ONE, left=1.0)), *ranks(None, call(ONE))[1:]],
    "one that ran ahead waits for those behind": [
        also(ranks(call((1, 6)))[0], call(ONE, left=1.0)),
        *ranks(None, call(ONE))[1:],
    ],
}


@pytest.mark.parametrize("case", MAY_GO_ON)
def test_what_may_still_go_on_is_not_judged(case):
    assert judged(MAY_GO_ON[case]) == ""


def test_different_calls_at_one_number_are_a_mismatch_also_where_they_differ_only_at_the_end():
    finding = judge(ranks(call(), call(text=BARRIER), call()), {ONE})
    error = finding.notice.error()
    assert isinstance(error, AgreementError)
    assert error.raised_everywhere
    assert str(error) == (
        "ranks made different calls (collective 5 of group world):\n"
        f"  ranks 0, 2: {SUM} at train.py:7 (step)\n"
        f"  rank 1: {BARRIER} at train.py:7 (step)\n"
        "Every rank must make the same collective calls in the same order, with the same operation, structure, dtypes and "
        "shapes."
    )
    finding = judge(ranks(call(), replace(call(), digest=hash_of("another end"))), {ONE})
    assert finding.notice.is_mismatch
    waits, computes = ranks(call(), call(text=BARRIER, left=1.0, has_failed=True))
    refused = call(text=BARRIER, left=3.0, has_failed=True)
    assert judged([replace(waits, calls=(call(), refused)), computes]) == ""
    assert waits_for([replace(waits, calls=(call(), refused)), computes], {ONE}) == {0: [1]}
    assert BARRIER in judged([waits, replace(computes, calls=(*computes.calls, refused))])


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (ranks(call(), call(text=BARRIER, left=1.0)), BARRIER),
        (ranks(call(), call(text=BARRIER, left=1.0, has_failed=True)), BARRIER),
        (
            ranks(call(), call(text=BARRIER), None),
            "  rank 2: has not come to it: alive; no collective yet; now at data.py:2 (load)\n",
        ),
    ],
    ids=["one has left", "one has raised", "one has not come"],
)
def test_a_mismatch_is_told_wherever_the_ranks_are(states, text):
    assert text in judged(states)


def test_ranks_that_wait_for_each_other_are_stuck_where_nobody_has_moved():
    text = judged(ranks(call(ONE), call(TWO), call(ONE)))
    told = "ranks made different calls (they wait for each other):\n  ranks 0, 2: collective 5 of communicator 1, "
    assert text.startswith(told)
    assert "  rank 1: collective 5 of communicator 2, " in text
    assert judge(ranks(call(ONE), call(TWO)), {ONE}) is None, "the other one was not looked up"
    assert "rank 1 will not come to a collective" in judged(ranks(call(is_started=True), None, rank1="ended"))
    first, moved = ranks(call(ONE), call(TWO)), ranks(call(ONE), replace(call(TWO), entered=1))
    findings = [judge(states, {ONE, TWO}) for states in (first, list(first), moved)]
    assert findings[0] == findings[1] != findings[2]


@pytest.mark.parametrize(
    ("state", "words"),
    [("ended", "its program has ended"), ("gone", "its process is gone"), ("failed", "its program has raised an error")],
)
def test_waiting_for_a_rank_that_is_over_is_in_vain(state, words):
    error = judge(ranks(call(), call((1, 4), BARRIER, left=1.5), call(), rank1=state), {ONE}).notice.error()
    assert isinstance(error, UnavailableError)
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 will not come to a collective that others wait in:"
    assert lines[1].startswith(f"  rank 1 (node0): {words}; last collective 4, {BARRIER} at train.py:7 (step), ended 1.5 s ago")
    assert lines[2] == f"  ranks 0, 2: collective 5, {SUM} at train.py:7 (step)"


@pytest.mark.parametrize(("others", "is_known"), [("", True), ("0-1", False)])
def test_nobody_waits_for_ranks_that_a_collective_does_not_take(others, is_known):
    first, second = replace(call(ONE), ranks=others), replace(call(TWO), ranks=others.replace("0-1", "2-3"))
    states = ranks(first, None, second, None)
    assert bool(judged(states)) is is_known
    assert waits_for(states, {ONE, TWO}) == ({0: [1, 2, 3], 2: [0, 1, 3]} if is_known else {0: [1], 2: [3]})
    assert ("rank 2" in stall_report(states[0], states)) is is_known


@pytest.mark.parametrize("listed", [NOT_LISTED, "3,-5", "\ufffd\x01", f"0-{10**12}"])
def test_nobody_is_waited_for_where_it_is_not_told_who_takes_part(listed):
    states = ranks(replace(call(ONE), ranks=listed), None, replace(call(TWO), ranks=listed), None)
    assert judged(states) == ""
    assert waits_for(states, {ONE, TWO}) == {0: [], 2: []}
    assert waits_for(ranks(call(), None, call(), None, rank3="unknown"), {ONE}) == {0: [1], 2: [1]}


def test_a_failed_rank_is_told_to_those_in_its_collective_and_in_later_ones_of_the_communicator(tmp_path):
    notices = Notices(tmp_path)
    notices.post(Notice(*ONE, "rank 1 has left", is_mismatch=False, is_for_all=False))
    for inside in [(1, 5)], [(1, 9)], [(2, 1), (1, 5)]:
        found = notices.first(inside)
        assert (found.concerns(inside), type(found.error())) == (inside[-1], UnavailableError)
    for inside in [(1, 4)], [(2, 5)], []:
        assert notices.first(inside) is None


def test_failures_of_two_communicators_at_once_are_both_told(monkeypatch):
    monkeypatch.setattr(Watcher, "_run", lambda self: None)  # its steps are taken below
    watcher = Watcher(2)
    watcher.post_failure((71, 3), UnavailableError("the first"))
    watcher.post_failure((72, 1), AgreementError("the second"))
    watcher._wait(0.0)
    told = [watcher._notices.first({key}) for key in ((71, 3), (72, 1))]
    assert [notice and notice.text for notice in told] == ["the first", "the second"]
    assert watcher._notices.first({(73, 1)}) is None


def test_interrupts_of_the_program_leave_no_thread_waiting():
    program = """
import faulthandler
from mpistrat.errors import UnavailableError
from mpistrat.watch.watcher import Watcher
from tests.interrupts import interrupted

faulthandler.dump_traceback_later(20, exit=True)
watcher = Watcher(2)
watcher._post = lambda notice: None
count = interrupted(lambda: [watcher.post_failure((71, 3), UnavailableError("planted")) for _ in range(10**9)])
print(count > 100, watcher.compare(10.0)[0].state)
"""
    assert python(program).stdout == "True out\n"


def test_a_new_strategy_ignores_what_all_were_told_and_not_what_concerns_a_communicator(tmp_path):
    notices = Notices(tmp_path)
    notices.post(Notice(1, 5, "for all", True))
    notices.post(Notice(2, 5, "rank 1 makes no collective after collective 4", False, is_for_all=False))
    notices.ignore()
    assert notices.first({(2, 6)}).number == 5
    assert notices.first({(1, 5)}) is None


def test_a_job_that_ends_while_notices_are_looked_for_has_none(tmp_path, monkeypatch):
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: (tmp_path / "job").rmdir() or scandir(folder))
    (tmp_path / "job").mkdir()
    Notices(tmp_path / "job").ignore()


def test_a_rank_that_has_refused_a_collective_is_told_only_in_there_that_others_wait_in_it(tmp_path):
    notices = Notices(tmp_path)
    notices.refuse(1, 5)
    notices.post(Notice(1, 5, "rank 1: which failed", True))
    notices.ignore()  # a new strategy is made
    assert notices.first({(2, 1)}) is None
    assert notices.first({(1, 5)}).number == 5


def test_the_report_names_who_is_in_it_or_has_failed_and_what_the_others_do():
    states = ranks(call(), call((1, 4), BARRIER, left=2.5), call(), None, rank3="stopped")
    assert stall_report(states[0], states).splitlines()[:4] == [
        f"rank 0 (node0) has waited 2.0 s in collective 5, {SUM}",
        "  in it: ranks 0, 2 (node0, node1), since 2.0 s, from train.py:7 (step)",
        f"  missing: rank 1 (node0, pid 101): alive; last collective 4, {BARRIER} at train.py:7 (step), ended "
        "2.5 s ago; now at data.py:1 (load)",
        "  missing: rank 3 (node1, pid 103): stopped (by a signal or a debugger); no collective yet; "
        "last seen 0.1 s ago at data.py:3 (load)",
    ]
    states = ranks(call(), call(), rank1="stopped")
    assert "in it, but not running: rank 1 (node0, pid 101): stopped" in stall_report(states[0], states)
    assert "no rank is missing: all ranks are in the collective, but it does not complete" in stall_report(states[0], states)
    states = ranks(call(), call(left=1.0, has_failed=True), call(left=0.5))
    lines = stall_report(states[0], states).splitlines()
    assert lines[1:4] == [
        "  in it: rank 0 (node0), since 2.0 s, from train.py:7 (step)",
        "  has left it: rank 2 (node1), since 2.0 s, from train.py:7 (step)",
        f"  failed in it: rank 1 (node0, pid 101): alive; last collective 5, {SUM} at train.py:7 (step), failed 1.0 s ago; "
        "now at data.py:1 (load)",
    ]
    assert "no rank is missing" not in "\n".join(lines)
    states = ranks(call(), *[None] * 30)
    lines = stall_report(states[0], states).splitlines()
    assert len(lines) < 22
    assert "  missing, too: ranks 17-30" in lines


def test_states_go_through_json():
    states = ranks(call(), None, call(left=1.0))
    assert decode(encode(states)) == states


@pytest.mark.parametrize("later", [True, False])
def test_of_a_wrapper_and_the_program_that_it_starts_the_later_one_is_the_rank(monkeypatch, tmp_path, later):
    class Seen(process.Process):
        def environment(self):
            return {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}

    low, high = sorted([os.getpid(), os.getppid()])
    # numbers of processes begin again at low ones
    found = {low: Seen(low, 1, 8 + later, "python", False), high: Seen(high, 1, 9 - later, "python", True)}
    monkeypatch.setattr(process, "find", found.get)
    monkeypatch.setattr(states_of, "job_name", lambda *_: tmp_path.name)
    [rank], _ = states_of.Neighbours(tmp_path).states(expected=range(2))
    assert (rank.rank, rank.pid, rank.state) == (1, *((low, "absent") if later else (high, "stopped")))


def test_files_may_be_looked_at_by_two_threads(tmp_path, monkeypatch):
    neighbours, found = states_of.Neighbours(tmp_path), []

    def rank(file):
        if not found:  # here another thread comes, which finds one more
            found.append(FlightRecorder(tmp_path / "rank-1", 1, 2))
            neighbours.files()
        return int(file._header["rank"])

    FlightRecorder(tmp_path / "rank-0", 0, 2)
    files = neighbours.files()
    monkeypatch.setattr(RankFile, "rank", property(rank))
    assert neighbours.files()[0] is files[0]
    assert [file.pid for file in neighbours.files()] == [os.getpid()] * 2
