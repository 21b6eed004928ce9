"""The programs that the evidence of a GPU starts, on the stand-in: whole strategies and calls, on arrays of device memory."""

from __future__ import annotations

import ml_dtypes
import pytest

import mpistrat
from mpistrat.communicator.device import DeviceCommunicator
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.topology.world import World
from tests.gpu import call_time, verbs_rank
from tests.gpu.bound import stand_in


def test_every_verb_on_device_arrays(comm, monkeypatch):
    if comm.size != 4:
        pytest.skip("4 ranks on 2 nodes tell all")
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", "2x2")
    monkeypatch.setenv("MPISTRAT_ALLOW_SHARED_GPU", "1")
    monkeypatch.setattr(verbs_rank, "SHAPES", ((), (1,), (3, 5), (0, 4), (33, 17), (5001,)))
    monkeypatch.setattr(verbs_rank, "DTYPES", ("float32", "int16", ml_dtypes.bfloat16))
    with stand_in(comm, World.from_shape("2x2")):
        strategy = mpistrat.MultiWorkerMirroredStrategy()
        assert "staged" in verbs_rank._path(strategy)
        [compared] = strategy.experimental_local_results(strategy.run(verbs_rank._try_all, args=(strategy,)))
        strategy.close()
    assert compared > 200


def test_a_call_of_a_rank_alone_is_timed(comm):
    if comm.size > 1:
        pytest.skip("one rank is meant")
    world = World.from_shape("1x1")
    with stand_in(comm, world) as device:
        communicator = DeviceCommunicator(Hierarchy(comm, world), device)
        figures = call_time.measure(communicator, device, calls=1)
        communicator.close()
    assert figures.keys() == {"python_us", "python_us_of_gradients"}
    assert min(figures.values()) > 0
