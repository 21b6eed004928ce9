"""Which plans are cached: the same on all ranks, whichever path their calls take."""

import numpy as np
import pytest

from mpistrat.communicator.reductions import Reductions
from mpistrat.errors import InvalidArgumentError
from tests.launches import needs_ranks, up_to_ranks

pytestmark = up_to_ranks(3)


def test_all_ranks_forget_the_same_plan_whichever_of_them_use_it(comm, make_ops, world, monkeypatch):
    monkeypatch.setattr("mpistrat.communicator.programs.PROGRAMS_KEPT", 3)
    ops = make_ops(world, STRICT="0")
    ops.timeline.enabled = comm.rank == 0  # it looks its plans up, where the others take their fast paths
    for count in (1, 2, 3, 1, 4, 1, 2, 5, 4, 1):
        assert ops.all_reduce("sum", np.ones(count)).tolist() == [ops.size] * count
        kept = [shape for *_, [(_, shape, _)] in ops._programs._programs]
        assert comm.allgather(kept) == [kept] * comm.size
    assert kept == [(5,), (4,), (1,)]


@pytest.fixture
def looked_up(monkeypatch):
    """Note the calls whose arrays are looked at: those that take no plan by what they were seen to be like."""
    found = []
    look = Reductions.reduce

    def noted(self, verb, op, *arguments):
        found.append(op)
        return look(self, verb, op, *arguments)

    monkeypatch.setattr(Reductions, "reduce", noted)
    return found


@needs_ranks(2)
def test_arrays_with_a_fast_path_are_checked_again_after_a_change(comm, make_ops, world, looked_up):
    ops = make_ops(world, STRICT="0")
    arrays = [np.ones(70_000), np.ones(5, np.float32)]

    def is_known():
        del looked_up[:]
        assert [(total == comm.size).all() for total in ops.all_reduce("sum", arrays)] == [True, True]
        return not looked_up

    def strictly():
        ops.is_strict = True
        assert not is_known()
        assert not is_known()
        ops.is_strict = False

    assert [is_known(), is_known()] == [False, True]
    held = ops.memory_report().window_bytes
    ops.all_reduce("sum", [np.ones(1 << 21, np.float32), np.ones(1, np.int8)])
    assert is_known() == (ops.memory_report().window_bytes == held), "what was bound to the memory held before is bound anew"
    strictly()
    assert [is_known(), is_known()] == [False, True]
    work = ops.start_all_reduce("sum", arrays)
    assert not is_known(), "it waits for what was started"
    work.wait()
    ops.timeline.enabled = True
    assert not is_known()
    ops.timeline.enabled = False
    assert is_known()
    with pytest.raises(InvalidArgumentError, match="out"):
        ops.all_reduce("sum", arrays, out=[np.empty(70_000), np.empty(6, np.float32)])
    comm.Barrier()
    ops.close()
    with pytest.raises(RuntimeError, match="was closed"):
        ops.all_reduce("sum", arrays)
