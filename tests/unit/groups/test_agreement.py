"""Words of calls: equal for equal texts in every process, apart for others, and carried in the tags of messages."""

import numpy as np
import pytest

from mpistrat.groups.agreement import COMPARED, CallsDifferError, Signature, calls_differ, chained, digest_of
from mpistrat.groups.group import MOST_UNCONFIRMED, CallState
from tests.processes import python

TEXTS = [f"all_reduce({op}, [{dtype} ({count},)])" for op in ("SUM", "MAX") for dtype in ("f4", "f8") for count in range(200)]


def test_words_are_equal_in_every_process_and_the_digest_of_a_series_depends_on_its_order():
    digests = [digest_of(text) for text in TEXTS]
    assert len(set(digests)) == len(TEXTS)
    assert all(0 <= digest < 2**63 and not digest & COMPARED for digest in digests)
    program = f"from mpistrat.groups.agreement import digest_of; print([digest_of(text) for text in {TEXTS[:5]!r}])"
    assert python(program).stdout.strip() == str(digests[:5])
    one, two = digest_of("one"), digest_of("two")
    assert chained(0, one) == one
    assert chained(one, two) != chained(two, one)
    assert not chained(one, two) & COMPARED


def test_messages_of_other_calls_have_other_tags_which_mpi_accepts(monkeypatch):
    from mpi4py import MPI

    call = CallState()
    tags = set()
    for text in TEXTS:
        call.digest = Signature(text).digest
        tags |= {call.tag(channel) for channel in range(4)}
    assert len(tags) == 4 * len(TEXTS)
    assert max(tags) <= MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert min(tags) >= 1 << 15, "smaller tags are those of notices"
    monkeypatch.setattr("mpistrat.groups.group._MAX_TAG", 32_767)  # the largest that every MPI has
    assert CallState().tag(3) == 3


@pytest.mark.parametrize(("nbytes", "calls"), [(8, MOST_UNCONFIRMED), (1 << 16, 8), (1 << 30, 1)])
def test_calls_are_confirmed_after_so_many_at_most(monkeypatch, nbytes, calls):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    call, confirmed = CallState(), []
    call.compare_history = confirmed.append
    for number in range(calls):
        assert not confirmed, number
        call.digest = digest_of(str(number))
        call.count()
        call.add_unconfirmed(nbytes)
    assert len(confirmed) == 1
    call.confirm()
    call.confirm()
    assert len(confirmed) <= 2, "there is nothing left to confirm"


def test_calls_of_every_kind_count_after_one_that_is_unconfirmed_each_and_in_order(monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    call, confirmed = CallState(), []
    call.compare_history = confirmed.append
    call.count()
    call.add_unconfirmed(8)
    for _ in range(MOST_UNCONFIRMED - 1):
        assert not confirmed
        call.count()
    assert len(confirmed) == 1
    call.count()
    assert not call.unconfirmed
    found = set()
    for texts in (["a", "b"], ["b", "a"], ["a", "c"], ["a"]):
        call = CallState()
        call.compare_history = found.add
        for text in texts:
            call.digest = digest_of(text)
            call.add_unconfirmed(8)
        call.confirm()
    assert len(found) == 4
    assert all(np.int64(history) == history for history in found)


def test_the_error_names_who_made_which_call_if_they_differ():
    first, *lines = str(calls_differ(7, {2: "barrier()", 0: "gather()", 4: "barrier()", 1: "barrier()"})).splitlines()
    assert first == "ranks made different calls (collective 7 of group world):"
    assert lines[:2] == ["  rank 0: gather()", "  ranks 1-2, 4: barrier()"]
    assert "The calls are equal; an earlier" in str(calls_differ(1, dict.fromkeys(range(3), "barrier()")))
    assert "The calls are equal" not in str(calls_differ(1, {0: "barrier()", 1: "close()"}))
    # texts can be exchanged where all compare
    assert CallsDifferError([digest_of("a") | COMPARED, digest_of("b") | COMPARED]).all_compare
    assert not CallsDifferError([digest_of("a") | COMPARED, digest_of("b")]).all_compare
