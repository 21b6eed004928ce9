"""Tuning on several ranks: all learn what rank 0 reads, or what all have measured, and choose alike."""

import re
from argparse import Namespace
from unittest.mock import Mock

import numpy as np
import pytest

import mpistrat
from mpistrat.algorithms.planners import NOTHING, PLANNERS
from mpistrat.errors import LaunchError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.tools import tune
from mpistrat.tools.tune import measure
from mpistrat.topology.world import World
from mpistrat.tuning import Tuning, present_conditions, shared_measurements, tuning_path
from tests.launches import needs_ranks, up_to_ranks

pytestmark = up_to_ranks(4)


@pytest.fixture(autouse=True)
def in_haste(monkeypatch):
    """Let what is measured here take no longer than it must."""
    monkeypatch.setattr("mpistrat.tools.bench.BUDGET_SECONDS", 0.0)


@pytest.fixture
def kept(comm, monkeypatch, tmp_path):
    """Give the folder of rank 0, in which it looks for files; the other ranks have none of theirs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path) if comm.Get_rank() == 0 else "/nowhere")
    monkeypatch.setenv("MPISTRAT_TUNING", "auto")
    return tmp_path / "mpistrat"


@pytest.fixture
def hierarchy(comm):
    """Give groups of one shape: what is found in files does not hang on it."""
    groups = Hierarchy(comm, World.from_shape(f"1x{comm.size}"))
    yield groups
    groups.close()


@needs_ranks(2)
def test_all_ranks_measure_alike(comm, world):
    with mpistrat.Communicator(Hierarchy(comm, world), measured=NOTHING, uses_gpu=False) as communicator:
        found = measure(communicator, 256)
    assert all({16, 64, 256} <= {*found[name]} for name in PLANNERS)
    assert all(0 < seconds < 60 for times in found.values() for seconds in times.values())
    assert all(each == found for each in comm.allgather(found))


@needs_ranks(2)
def test_nothing_is_measured_where_rank_0_has_no_folder_for_the_file(comm, monkeypatch):
    if comm.Get_rank() == 0:
        monkeypatch.setenv("MPISTRAT_TUNING", "~nobody-of-this-name/mine.json")
    monkeypatch.setattr(tune, "measure", Mock(side_effect=AssertionError("is measured")))
    with pytest.raises(LaunchError, match="MPISTRAT_TUNING=~nobody-of-this-name/mine.json: Could not determine home"):
        tune.execute(Namespace(show=False, ranks=None, nodes="", max_bytes="1KiB"))


@needs_ranks(2)
def test_all_ranks_choose_by_the_file_of_rank_0(comm, make_ops, world, kept):
    slowest_first = [*PLANNERS][::-1]
    found = {name: {64: 1e-6 * 10**place} for place, name in enumerate(slowest_first)}
    if comm.Get_rank() == 0:
        tuning = Tuning(present_conditions(world), found)
        tuning.write(tuning_path(tuning.conditions))
    ops = make_ops(world)
    explained = ops.explain(np.ones(16, np.float32))
    choice = explained.packs[0].choice
    assert choice.plan.algorithm == slowest_first[0]
    assert choice.seconds == {name: times[64] for name, times in found.items()}
    assert (ops.all_reduce(mpistrat.ReduceOp.SUM, [np.ones(16, np.float32)])[0] == comm.Get_size()).all()
    assert len(set(comm.allgather(explained.source))) == 1
    text = str(explained)
    assert "\npredicted  1 µs" in text
    assert re.search(rf"\n{slowest_first[0]} +1 µs +chosen\n", text)
    assert re.search(r"\nMeasured: .*\.json, 2\d{3}-\d\d-\d\d\.$", text)


@needs_ranks(2)
def test_a_broken_file_changes_nothing_and_rank_0_says_so(comm, hierarchy, kept, said):
    if comm.Get_rank() == 0:
        kept.mkdir()
        (kept / present_conditions(hierarchy.world).file_name).write_text("{")
    assert shared_measurements(hierarchy) == NOTHING
    assert said.getvalue().count("is ignored") == (1 if comm.Get_rank() == 0 else 0)


@needs_ranks(2)
def test_what_keeps_rank_0_from_a_file_is_told_to_all(comm, hierarchy, kept, monkeypatch):
    if comm.Get_rank() == 0:
        monkeypatch.setattr("mpistrat.tuning._find", Mock(side_effect=KeyError("planted")))
    with pytest.raises(mpistrat.errors.AgreementError, match="rank 0 failed for all: KeyError: 'planted'"):
        shared_measurements(hierarchy)
