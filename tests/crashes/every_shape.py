"""Saves that are stopped, on more nodes and by more errors than in tests/ranks: ``pytest tests/crashes/every_shape.py``."""

from pathlib import Path

import pytest

from mpistrat.launch.bootstrap import start
from tests.crashes import saves

pytestmark = pytest.mark.ranks(nodes=["1x1", "1x2", "2x1", "2x2", "3+1"])


@pytest.fixture
def shared(tmp_path):
    """Give a communicator of all ranks, and a folder that they share."""
    comm = start().Dup()
    yield comm, Path(comm.bcast(str(tmp_path)))
    comm.Barrier()
    comm.Free()


def test_whenever_ranks_or_a_machine_stop_the_last_checkpoint_or_the_one_before_is_whole(strategy, shared):
    comm, root = shared
    num_cuts, num_states, wrong = saves.after_each_stop(comm, saves.record(comm, strategy, root))
    assert not wrong, f"of {num_cuts} moments, {num_states} contents of the disk: {wrong[:20]}"


def test_whichever_call_fails_all_ranks_are_told_and_the_job_goes_on(strategy, shared):
    comm, root = shared
    texts = list(saves.fail_each(comm, strategy, root))
    assert not list(filter(None, texts))
    assert len(texts) > 20
