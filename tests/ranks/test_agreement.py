"""Agreement: equal calls pass, different ones raise on every rank and say who passed what."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpistrat.errors import AgreementError, InvalidArgumentError, UnsupportedDtypeError
from mpistrat.groups import group as groups
from mpistrat.groups.agreement import Agreement
from mpistrat.groups.group import Group
from tests.launches import needs_ranks


def test_equal_calls_pass(group):
    agreement = Agreement(group)
    for call in ("barrier()", "all_reduce(SUM, [float32 (3,)])", "barrier()", ""):
        agreement.check(call)


@needs_ranks(2)
def test_different_calls_raise_on_every_rank_and_name_who_made_which(group):
    agreement = Agreement(group)
    agreement.check("barrier()")
    last = group.size - 1
    with pytest.raises(AgreementError) as caught:
        agreement.check("all_reduce(SUM, [float16 (4,)])" if group.rank == last else "all_reduce(SUM, [float32 (4,)])")
    lines = str(caught.value).splitlines()
    others = "rank 0" if last == 1 else f"ranks 0-{last - 1}"
    assert lines == [
        "ranks made different calls (collective 2 of group world):",
        f"  {others}: all_reduce(SUM, [float32 (4,)])",
        f"  rank {last}: all_reduce(SUM, [float16 (4,)])",
        "Every rank must make the same collective calls in the same order, with the same operation, structure, dtypes and "
        "shapes.",
    ]
    assert caught.value.raised_everywhere
    agreement.check("the next call works")


@needs_ranks(3)
def test_ranks_are_named_by_spans(group):
    with pytest.raises(AgreementError) as caught:
        Agreement(group).check("odd" if group.rank % 2 else "even")
    named = {3: "ranks 0, 2: even", 4: "ranks 0, 2: even", 8: "ranks 0, 2, 4, 6: even"}
    assert named[group.size] in str(caught.value)


@needs_ranks(2)
def test_the_rank_with_an_error_raises_it_and_the_others_learn_of_it(group):
    agreement = Agreement(group)
    if group.rank == 1:
        error = UnsupportedDtypeError("array 0 has dtype object")
        with pytest.raises(UnsupportedDtypeError) as caught:
            agreement.check("all_reduce(SUM, [object ()])", error)
        assert caught.value is error
    else:
        found = r"rank 1: all_reduce\(SUM, \[object \(\)\]\), which failed: UnsupportedDtypeError: array 0 has dtype object"
        with pytest.raises(AgreementError, match=found):
            agreement.check("all_reduce(SUM, [float32 ()])")
    agreement.check("the next call works")


def test_an_error_on_all_ranks_is_raised_as_it_is(group):
    agreement = Agreement(group)
    with pytest.raises(InvalidArgumentError, match="axis 7"):
        agreement.check("all_gather(axis=7)", InvalidArgumentError("axis 7 is out of range"))
    agreement.check("the next call works")


@needs_ranks(2)
def test_different_errors_are_raised_each_on_its_rank(group):
    agreement = Agreement(group)
    with pytest.raises(InvalidArgumentError, match=f"mine, rank {group.rank}"):
        agreement.check("all_gather", InvalidArgumentError(f"mine, rank {group.rank}"))
    agreement.check("the next call works")


@needs_ranks(2)
def test_groups_check_for_themselves(comm):
    # ranks of different groups make different calls at the same time
    colour = comm.rank % 2
    ranks = tuple(rank for rank in range(comm.size) if rank % 2 == colour)
    group = Group(comm.Split(colour, comm.rank), f"half {colour}", ranks)
    Agreement(group).check(f"call of half {colour}")
    if group.size > 1:
        with pytest.raises(AgreementError, match=rf"collective 1 of group half {colour}\):\n  rank {ranks[0]}: 0\n"):
            Agreement(group).check(str(min(group.rank, 1)))
    group.close()


@needs_ranks(2)
def test_a_rank_that_waits_for_texts_can_be_told_by_the_watcher(comm, group, monkeypatch):
    def tell():
        raise AgreementError("planted")

    if group.rank:
        monkeypatch.setattr("mpistrat.groups.agreement.watcher", lambda: SimpleNamespace(raise_verdict=tell))
        with pytest.raises(AgreementError, match="planted"):
            Agreement(group).exchange(["a text"])
        # MPI writes to the buffers of the exchange when rank 0 comes
        assert not groups._kept[-1].Test()
    comm.Barrier()
    if group.rank == 0:  # completes what the others have started
        group.comm.Iallgather(np.zeros(1, np.int64), np.empty(group.size, np.int64)).Wait()
