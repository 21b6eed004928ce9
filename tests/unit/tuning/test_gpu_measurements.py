"""What was measured on GPUs: it comes back as it went, and auto takes the way that was faster."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpistrat.algorithms.cost import DEFAULT, GpuTimes
from mpistrat.device.binding import bind
from mpistrat.errors import DeadlineExceededError
from mpistrat.tools.bench import timed
from mpistrat.topology.world import World
from mpistrat.tuning.file import read
from mpistrat.tuning.gpu_measurements import BETWEEN_NODES, IN_SHOTS, GpuMeasurements, measure_on_gpus
from mpistrat.tuning.model import Tuning
from tests.gpu.stand_in import UNFINISHED, StandInDevice
from tests.gpu.stand_in_arrays import stand_in_gpu
from tests.unit.tuning.test_model import HERE, TUNING, WORLD, changed

NODES = GpuMeasurements("NVIDIA H100", ("mpi", "nccl"), ((16, 1e-5, 2e-5), (4096, 3e-5, 2e-5), (2**20, 8e-4, 2e-4)))
TUNED = replace(TUNING, gpus=NODES)


def shots(*rows: tuple[int, float, float]) -> GpuMeasurements:
    return GpuMeasurements("NVIDIA H100", ("one shot", "two shots"), rows)


@pytest.mark.parametrize("gpus", [NODES, shots((16, 1e-5, 2e-5)), None])
def test_the_document_comes_back_as_it_went(gpus: GpuMeasurements | None) -> None:
    tuning = replace(TUNING, gpus=gpus)
    assert Tuning.from_document(json.loads(json.dumps(tuning.document())), WORLD) == tuning
    assert ("gpus" in tuning.document()) == (gpus is not None)


def test_a_file_without_it_chooses_as_nothing_measured() -> None:
    assert TUNING.model("a file").gpu_times == GpuTimes() == DEFAULT.gpu_times
    assert str(GpuTimes()) == ""


def test_between_nodes_the_faster_one_is_taken_at_each_size() -> None:
    times = TUNED.model("a file").gpu_times
    assert times.nccl_over_mpi == ((16, 2.0), (4096, pytest.approx(2 / 3)), (2**20, 0.25))
    assert [times.nccl_ratio(size) for size in (0, 16, 2**30)] == [2.0, 2.0, 0.25]
    assert times.nccl_ratio(256) == pytest.approx((2 + 2 / 3) / 2)
    assert str(times) == f"NCCL was faster than MPI at 2 of 3 sizes (measured {TUNED.date} by mpistrat tune)"
    assert NODES.chosen() == {16: "mpi", 4096: "nccl", 2**20: "nccl"}


@pytest.mark.parametrize(
    ("ratios", "limit"),  # two shots over one, from 16 bytes on
    [
        ((2, 2, 2), 256),
        ((0.5, 0.5, 0.5), 0),
        ((2, 2, 0.5), 64),
        ((0.9, 2, 0.5), 64),  # one size that chance has turned round does not count for more than it is
        ((2, 0.5, 1.1), 16),
    ],
)
def test_one_shot_is_taken_up_to_the_size_that_costs_least(ratios: tuple[float, ...], limit: int) -> None:
    found = shots(*((4 ** (index + 2), 1e-5, 1e-5 * ratio) for index, ratio in enumerate(ratios)))
    assert found.times("").one_shot_bytes == limit
    assert found.chosen() == {size: "one shot" if size <= limit else "two shots" for size in (16, 64, 256)}
    assert str(found.times("2026-11-23")).startswith(f"one shot up to {limit} B (measured 2026-11-23")


def test_each_way_is_taken_by_auto_at_every_size() -> None:
    assert (BETWEEN_NODES["mpi"].nccl_wins, BETWEEN_NODES["nccl"].nccl_wins) == (0, 1)
    assert {BETWEEN_NODES["nccl"].nccl_ratio(size) for size in (0, 16, 2**40)} == {0.0}
    assert [times.one_shot_bytes for times in IN_SHOTS.values()] == [sys.maxsize, 0]


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        (3, "it is not a file of mpistrat tune (TypeError"),
        ({"device": "x"}, "it is not a file of mpistrat tune (KeyError"),
        ({"device": "x", "seconds": {"nccl": {}, "pigeons": {}}}, "it names unknown ways on GPUs: nccl, pigeons"),
        ({"device": "x", "seconds": {"mpi": {}, "nccl": {}}}, "it names no sizes on GPUs"),
        (
            {"device": "x", "seconds": {"mpi": {"16": 1e-5}, "nccl": {"64": 1e-5}}},
            "it is not a file of mpistrat tune (KeyError",
        ),
        ({"device": "x", "seconds": {"mpi": {"16": 1e-5}, "nccl": {"16": 0}}}, "0 is not a positive number"),
        ({"device": "x", "seconds": {"mpi": {"-16": 1e-5}, "nccl": {"-16": 1e-5}}}, "-16 is not a positive number"),
    ],
)
def test_what_cannot_be_used_is_said_and_ignored(gpus: object, reason: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / HERE.file_name
    path.write_text(changed(gpus=gpus))
    assert read(path, WORLD, HERE) is None
    assert reason in capsys.readouterr().err


def test_times_of_other_gpus_are_not_used(tmp_path: Path, capsys) -> None:
    path, device = tmp_path / HERE.file_name, StandInDevice()
    bind(device)
    try:
        for name, times in (("NVIDIA H100", GpuTimes()), (device.identity().name, TUNED.model("").gpu_times)):
            path.write_text(json.dumps(replace(TUNED, gpus=replace(NODES, device=name)).document()))
            model = read(path, World.from_shape("2x2"), HERE)
            assert model is not None
            assert model.gpu_times == times
            assert model.corrections == TUNED.model("").corrections
    finally:
        bind(None)
        device.close()
    said = capsys.readouterr().err
    assert said == f"mpistrat: what {path} says of GPUs is ignored: it was measured on NVIDIA H100\n"


@pytest.mark.parametrize("caller", ["mpistrat tune", "mpistrat bench"])
def test_what_is_measured_on_a_gpu_has_a_deadline(caller: str, monkeypatch) -> None:
    monkeypatch.setattr("mpistrat.tuning.gpu_measurements.DEADLINE_SECONDS", 0.05)
    with stand_in_gpu() as device:

        def all_reduce(*_: object) -> None:
            device.current_stream().put(lambda: UNFINISHED)  # a kernel that waits for a rank that does not come

        ways = dict.fromkeys(IN_SHOTS, SimpleNamespace(all_reduce=all_reduce))
        measure = {
            "mpistrat tune": lambda: measure_on_gpus(None, device, ways, 1024),
            "mpistrat bench": timed(all_reduce, SimpleNamespace(path="nccl inside nodes")),
        }
        with pytest.raises(DeadlineExceededError, match=r"a call that is measured on GPUs did not end within 0\.05 s"):
            measure[caller]()
