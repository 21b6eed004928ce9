"""The rounds in which leaders sum small arrays: what is sent must be what is received, and all must get the same sum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpistrat.reduction import ReduceOp
from mpistrat.transports import leaders


def sums(size: int, count: int, rounds_of: Any) -> list[Any]:
    """Return the sums of all ranks, of which the messages of each round are delivered here."""
    results = [np.full(count, np.nan) for _ in range(size)]
    groups: Any = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    # powers of two: every subset of the ranks has another sum
    own = [np.full(count, 2.0**rank) + np.arange(count) for rank in range(size)]
    plans = [list(rounds_of(list(leaders._members(groups[rank])), rank, own[rank], results[rank])) for rank in range(size)]
    for rounds in zip(*plans, strict=True):
        sent = {(rank, peer): array.copy() for rank, each in enumerate(rounds) for peer, array in each.sends.items()}
        for rank, each in enumerate(rounds):
            for peer, array in each.receives.items():
                array[...] = sent.pop((peer, rank))
            if each.addends:
                each.target[...] = sum(each.addends)
        assert not sent
    return results


@pytest.mark.parametrize("rounds_of", [leaders._doubling, leaders._halving])
@pytest.mark.parametrize("size", leaders.RADICES)
@pytest.mark.parametrize("count", [0, 1, 5, 37])
def test_every_leader_gets_the_sum(size: int, count: int, rounds_of: Any) -> None:
    expected = 2.0**size - 1 + size * np.arange(count)
    for result in sums(size, count, rounds_of):
        np.testing.assert_array_equal(result, expected)


def test_messages_of_two_ranks_have_another_tag_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    received, request = [], SimpleNamespace(Test=None)
    monkeypatch.setattr(leaders, "byte_message", lambda array: array)
    call = SimpleNamespace(digest=5, tag=lambda channel: 100 + channel)
    comm = SimpleNamespace(Recv_init=lambda _, peer, tag: received.append((peer, tag)) or request, Send_init=lambda *_: request)
    bound: Any = leaders.LeaderSum.__new__(leaders.LeaderSum)
    bound._group, bound._digest, bound._requests = SimpleNamespace(call=call, comm=comm, rank=0, size=4), -1, []
    bound._op, bound._is_finalized = ReduceOp.SUM, lambda: True
    own, result = np.ones(8), np.empty(8)
    bound._plan = list(leaders._halving(list(leaders._members(bound._group)), 0, own, result))
    bound._bound()
    assert len(set(received)) == len(received) == 4  # MPI may start them in any order


@pytest.mark.parametrize("call", ["run", "steps"])
def test_memory_of_a_sum_that_is_given_up_is_kept(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    kept: list[object] = []
    monkeypatch.setattr(leaders, "keep_alive_for_peers", kept.append)
    given_up: Any = leaders.LeaderSum.__new__(leaders.LeaderSum)
    given_up._start_all, given_up._is_finalized = lambda _: None, lambda: True
    given_up._bound = lambda: ([], [([lambda: False], lambda: None, [])], [])

    def wait(_: object) -> None:
        raise KeyboardInterrupt

    if call == "run":
        with pytest.raises(KeyboardInterrupt):
            given_up.run(wait)
    else:
        steps = given_up.steps()
        assert next(steps) is False
        steps.close()
    assert kept == [given_up]
