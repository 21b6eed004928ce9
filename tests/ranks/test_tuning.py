"""Tuning on several ranks: all learn what rank 0 reads, or what all have measured, and choose alike."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat import cache
from mpistrat.algorithms.choose import PLANNERS
from mpistrat.algorithms.cost import DEFAULT
from mpistrat.communicator.communicator import Communicator, by_algorithm
from mpistrat.errors import AgreementError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from mpistrat.topology.world import World
from mpistrat.tuning.file import shared_model, tuning_path
from mpistrat.tuning.measure import measure, measure_links
from mpistrat.tuning.model import Measurement, Tuning, present_conditions
from tests.launches import needs_ranks, up_to_ranks

pytestmark = up_to_ranks(4)

FLOAT = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def in_haste(monkeypatch):
    """Let what is measured here take no longer than it must."""
    for name in ("_PASS_SECONDS", "_ENOUGH_SECONDS"):
        monkeypatch.setattr(f"mpistrat.tuning.measure.{name}", 0.0)


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
    told = []
    found = measure(comm, world, by_algorithm, 256, lambda num_bytes, times: told.append((num_bytes, times)))
    assert {(one.algorithm, one.num_bytes) for one in found} >= {(n, s) for n in PLANNERS for s in (16, 64, 256)}
    assert all(0 < one.seconds < 60 for one in found)
    assert sorted(size for size, _ in told) == sorted({one.num_bytes for one in found})
    assert len({tuple((one.algorithm, one.num_bytes, one.seconds) for one in each) for each in comm.allgather(found)}) == 1


@needs_ranks(2)
def test_all_ranks_measure_the_same_number_of_links(comm, world):
    found = comm.allgather(measure_links(comm, world))
    assert len(set(found)) == 1
    assert 1 <= found[0] <= (min(world.local_sizes) if world.num_nodes > 1 else 1)


@needs_ranks(4)
@pytest.mark.parametrize(("together", "links"), [(0.02, 1), (0.014, 1), (0.011, 2), (0.004, 2), (0.1, 1)])
def test_links_are_counted_by_what_ranks_send_together(comm, monkeypatch, together, links):
    monkeypatch.setattr("mpistrat.tuning.measure._exchange_seconds", lambda *arguments: together if arguments[2] > 1 else 0.01)
    assert measure_links(comm, World.from_shape(f"{comm.size // 2}x2")) == links
    assert measure_links(comm, World.from_shape(f"1x{comm.size}")) == 1


@needs_ranks(2)
def test_all_ranks_choose_by_the_file_of_rank_0(comm, world, kept):
    slowest_first = [*PLANNERS][::-1]
    found = [Measurement(world, name, 64, 1e-6 * 10**place) for place, name in enumerate(slowest_first)]
    if comm.Get_rank() == 0:
        tuning = Tuning.of(present_conditions(world), found)
        cache.write(tuning.document(), tuning_path(tuning.conditions))
    ops = Communicator(Hierarchy(comm, world))
    choice = ops.choose(16, FLOAT)
    assert choice.plan.algorithm == slowest_first[0]
    assert [round(one.seconds * 1e6) for one in sorted(choice.considered, key=lambda one: one.seconds)] == [
        10**place for place in range(len(slowest_first))
    ]
    total = ops.all_reduce(ReduceOp.SUM, [np.ones(16, np.float32)])[0]
    assert (total == comm.Get_size()).all()
    ops.close()
    sources = comm.allgather(ops.model.source)
    assert len(set(sources)) == 1
    assert ", measured 2" in sources[0]


@needs_ranks(2)
def test_a_broken_file_changes_nothing_and_rank_0_says_so(comm, hierarchy, kept, said):
    if comm.Get_rank() == 0:
        kept.mkdir()
        (kept / present_conditions(hierarchy.world).file_name).write_text("{")
    assert shared_model(hierarchy, by_algorithm) == DEFAULT
    assert said.getvalue().count("is ignored") == (1 if comm.Get_rank() == 0 else 0)


@needs_ranks(2)
def test_on_first_use_it_is_measured_and_kept_where_that_is_asked_for(comm, hierarchy, kept, monkeypatch, said):
    assert shared_model(hierarchy, by_algorithm) == DEFAULT
    monkeypatch.setenv("MPISTRAT_TUNING", "measure")
    monkeypatch.setattr("mpistrat.tuning.measure.MAX_BYTES", 64)
    first = shared_model(hierarchy, by_algorithm)
    second = shared_model(hierarchy, by_algorithm)
    assert first == second != DEFAULT
    assert len(set(comm.allgather(first))) == 1
    if comm.Get_rank() == 0:
        assert said.getvalue().count(", and wrote ") == 1
        assert len(list(kept.iterdir())) == 1
    monkeypatch.setenv("MPISTRAT_TUNING", "off")
    assert shared_model(hierarchy, by_algorithm) == DEFAULT


@needs_ranks(2)
@pytest.mark.parametrize("where", ["_find", "_keep"])
def test_what_keeps_rank_0_from_a_model_is_told_to_all(comm, hierarchy, kept, monkeypatch, where):
    def fail(*_):
        raise KeyError("planted")

    monkeypatch.setenv("MPISTRAT_TUNING", "measure")
    monkeypatch.setattr("mpistrat.tuning.measure.MAX_BYTES", 64)
    if comm.Get_rank() == 0:
        monkeypatch.setattr(f"mpistrat.tuning.file.{where}", fail)
    with pytest.raises(AgreementError, match="rank 0 failed for all: KeyError: 'planted'"):
        shared_model(hierarchy, by_algorithm)


@needs_ranks(2)
def test_what_cannot_be_kept_is_used_all_the_same(comm, hierarchy, kept, monkeypatch, said):
    monkeypatch.setenv("MPISTRAT_TUNING", "measure")
    monkeypatch.setattr("mpistrat.tuning.measure.MAX_BYTES", 64)
    kept.write_text("a file where the folder should be")
    model = shared_model(hierarchy, by_algorithm)
    assert model.source.startswith("this run, measured ")
    assert ("could not be cached" in said.getvalue()) == (comm.Get_rank() == 0)
