"""The rounds in which leaders sum small arrays: messages are told apart, and memory of a sum that is given up is kept."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpistrat.reduction import ReduceOp
from mpistrat.transports import small


def test_messages_of_two_ranks_have_another_tag_in_each_round(monkeypatch):
    received, request = [], SimpleNamespace(Test=None)
    monkeypatch.setattr(small, "byte_message", lambda array: array)
    call = SimpleNamespace(digest=5, tag=lambda channel: 100 + channel)
    comm = SimpleNamespace(Recv_init=lambda _, peer, tag: received.append((peer, tag)) or request, Send_init=lambda *_: request)
    bound: Any = small.LeaderSum.__new__(small.LeaderSum)
    bound._group, bound._digest, bound._requests = SimpleNamespace(call=call, comm=comm, rank=0, size=4), -1, []
    bound._op, bound._is_finalized = ReduceOp.SUM, lambda: True
    own, result = np.ones(8), np.empty(8)
    bound._plan = list(small._halving(list(small._members(bound._group)), 0, own, result))
    bound._bound()
    assert len(set(received)) == len(received) == 4  # MPI may start them in any order


@pytest.mark.parametrize("call", ["run", "steps"])
def test_memory_of_a_sum_that_is_given_up_is_kept(monkeypatch, call):
    kept: list[object] = []
    monkeypatch.setattr(small, "keep_alive_for_peers", kept.append)
    given_up: Any = small.LeaderSum.__new__(small.LeaderSum)
    given_up._start_all, given_up._is_finalized = lambda _: None, lambda: True
    given_up._bound = lambda: ([], [([lambda: False], lambda: None, [])], [])

    def wait(_):
        raise KeyboardInterrupt

    if call == "run":
        with pytest.raises(KeyboardInterrupt):
            given_up.run(wait)
    else:
        steps = given_up.steps()
        assert next(steps) is False
        steps.close()
    assert kept == [given_up]
