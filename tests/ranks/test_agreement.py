"""Agreement: equal calls pass, different ones raise on every rank and say who passed what."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpistrat.errors import AgreementError
from mpistrat.groups import group as groups
from mpistrat.groups.agreement import Agreement
from tests.launches import needs_ranks


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
