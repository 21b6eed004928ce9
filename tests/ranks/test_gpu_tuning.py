"""Tuning on GPUs: all ranks choose by what rank 0 reads, and MPI works wherever NCCL does not. GPUs are stood in for."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pytest

from mpistrat import cache
from mpistrat.algorithms.cost import DEFAULT
from mpistrat.communicator.gpu_ways import gpu_ways
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import AgreementError
from mpistrat.reduction import ReduceOp
from mpistrat.tools import cli
from mpistrat.topology.world import World
from mpistrat.tuning.corrections import Measurement
from mpistrat.tuning.file import tuning_path
from mpistrat.tuning.gpu_measurements import GpuMeasurements, measure_on_gpus
from mpistrat.tuning.model import Tuning, present_conditions
from tests.gpu import stand_in_nccl
from tests.gpu.bound import stand_in
from tests.gpu.pair import Pair, values
from tests.launches import needs_ranks, up_to_ranks

pytestmark = [needs_ranks(4), up_to_ranks(4)]

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
DATE = "2026-11-22"
SMALL, LARGE = 16, 1 << 16
NCCL_IF_LARGE = ((SMALL, 1e-5, 2e-5), (LARGE, 4e-4, 1e-4))
NCCL_NEVER = ((SMALL, 1e-5, 2e-5), (LARGE, 1e-4, 4e-4))


@pytest.fixture(autouse=True)
def kept(comm, monkeypatch, tmp_path):
    """Give the folder in which each rank looks for files, and let what is measured take no longer than it must."""
    folders = comm.allgather(str(tmp_path / f"of rank {comm.rank}"))
    monkeypatch.setenv("XDG_CACHE_HOME", folders[comm.rank])
    monkeypatch.setenv("MPISTRAT_TUNING", "auto")
    for name, value in {"_PASS_SECONDS": 0.0, "_ENOUGH_SECONDS": 0.0, "_MIN_PASSES": 1, "_TRIES": 1}.items():
        monkeypatch.setattr(f"mpistrat.tuning.measure.{name}", value)
    return tmp_path / f"of rank {comm.rank}" / "mpistrat"


def keep(comm, world, rows, ways=("mpi", "nccl"), rank=0):
    """Write the file that one rank finds; the others have none."""
    if comm.rank == rank:
        gpus = GpuMeasurements("stand-in", ways, rows)
        tuning = Tuning(present_conditions(world), DATE, DEFAULT.links, (Measurement(world, "flat", 16, 1e-5),), gpus)
        cache.write(tuning.document(), tuning_path(tuning.conditions))


def nccl_calls(pair, num_bytes, **options):
    """Compare sums of so many bytes with those of host memory; return how often NCCL reduced among all ranks."""
    calls = pair.library.calls["allReduce"]
    for op in (SUM, MEAN):
        arrays = [values(num_bytes // 4, np.float32, pair.rank) * np.float32(pair.size)]
        pair.compare(op, arrays, CommunicationOptions(**options))
    return pair.library.calls["allReduce"] - calls


def explained(pair, num_bytes, **options):
    return str(pair.gpu.explain(pair.up(np.ones(num_bytes // 4, np.float32)), CommunicationOptions(**options)))


@pytest.mark.parametrize("nodes", ["2x2", "3+1"])
def test_where_nccl_was_faster_auto_joins_all_ranks_and_takes_it_at_these_sizes(comm, nodes):
    world = World.from_shape(nodes)
    keep(comm, world, NCCL_IF_LARGE)
    with Pair(comm, world) as pair:
        found = f"NCCL was faster than MPI at 1 of 2 sizes (measured {DATE} by mpistrat tune)"
        assert {path[path.index("nccl between") :] for path in comm.allgather(pair.gpu.path)} == {
            "nccl between nodes where it is faster, else staged over mpi_ring between nodes (MPISTRAT_MPI_GPU=off); " + found
        }
        assert nccl_calls(pair, LARGE) == 2
        assert f"NCCL over all ranks takes 0.25 of the time with MPI between nodes (measured {DATE}" in explained(pair, LARGE)
        assert nccl_calls(pair, SMALL) == 0
        assert "; NCCL over all ranks takes 2.00 of the time with MPI between nodes" in explained(pair, SMALL)
        communicators = len(pair.library.communicators)
        for algorithm in ("flat", "hierarchical"):  # what was measured is one call of NCCL
            assert nccl_calls(pair, LARGE, algorithm=algorithm) == 0
        assert nccl_calls(pair, LARGE, deterministic=True) == 0
        assert "takes" not in explained(pair, LARGE, deterministic=True)
        pair.compare(SUM, [values(LARGE, np.dtype(np.float16), pair.rank)], CommunicationOptions(intra_dtype="native"))
        assert len(pair.library.communicators) == communicators, "no rails are joined, which might fail"
        gathered = pair.gpu.all_gather(pair.up(np.full(3, pair.rank, np.float32)))
        np.testing.assert_array_equal(pair.device.get(gathered), np.repeat(np.arange(pair.size), 3))
        assert pair.library.calls["allGather"] > 0, "all other verbs are NCCL's"


@pytest.mark.parametrize("mpi_gpu", ["off", "on"])
def test_calls_by_both_in_turn_with_several_chunks_and_started_ones(comm, monkeypatch, mpi_gpu):
    monkeypatch.setenv("MPISTRAT_MPI_GPU", mpi_gpu)
    monkeypatch.setenv("MPISTRAT_CHUNK_BYTES", "4096")
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    world = World.from_shape("2x2")
    keep(comm, world, ((SMALL, 2e-5, 1e-5), (4096, 2e-5, 1e-5), (8192, 1e-5, 2e-5)))
    with Pair(comm, world) as pair:
        assert f"else {'cuda_aware' if mpi_gpu == 'on' else 'staged over mpi_ring'} between nodes" in pair.gpu.path
        for turn in range(4):
            pair.gpu.timeline.enabled = turn > 1 and pair.rank == turn
            assert nccl_calls(pair, 36000) == 0
            assert nccl_calls(pair, 512) == 2
            given = [values(count, np.float32, turn + pair.rank) for count in (9000, 100, 5000)]
            works = [pair.gpu.start_all_reduce(SUM, pair.up(array)) for array in given]
            for work, array in zip(works, given, strict=True):
                np.testing.assert_array_equal(pair.device.get(work.wait()), pair.host.all_reduce(SUM, array))


def test_nodes_of_which_one_calls_nccl_and_the_other_mpi_are_told(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    world = World.from_shape("2x2")
    keep(comm, world, NCCL_IF_LARGE)
    with Pair(comm, world) as pair:
        arrays = [pair.up(np.ones(num_bytes // 4, np.float32)) for num_bytes in (SMALL, LARGE) * 2]
        for array in arrays:
            pair.gpu.all_reduce(SUM, array)
        with pytest.raises(AgreementError, match=r"\(16384,\)"):
            pair.gpu.all_reduce(SUM, arrays[comm.rank > 1])
        comm.Barrier()


def test_where_mpi_was_faster_it_is_taken_and_the_path_says_why(comm):
    world = World.from_shape("2x2")
    keep(comm, world, NCCL_NEVER)
    with Pair(comm, world) as pair:
        assert pair.gpu._gpu.executor.transports.everywhere is None
        assert nccl_calls(pair, LARGE) == 0
        found = f"(MPISTRAT_MPI_GPU=off); NCCL was faster than MPI at 0 of 2 sizes (measured {DATE} by mpistrat tune)"
        assert pair.gpu.path.endswith(found)
        assert found in explained(pair, LARGE)


def test_only_the_file_of_rank_0_counts(comm):
    world = World.from_shape("2x2")
    keep(comm, world, NCCL_IF_LARGE, rank=3)
    with Pair(comm, world) as pair:
        assert nccl_calls(pair, LARGE) == 0
        hint = "auto does not take it: MPISTRAT_INTER_TRANSPORT=nccl does, and mpistrat tune compares them"
        assert all(path.endswith(hint) for path in comm.allgather(pair.gpu.path))


@pytest.mark.parametrize(("wanted", "rows"), [("nccl", NCCL_NEVER), ("mpi_ring", NCCL_IF_LARGE)])
def test_what_is_asked_for_wins(comm, monkeypatch, wanted, rows):
    monkeypatch.setenv("MPISTRAT_INTER_TRANSPORT", wanted)
    world = World.from_shape("2x2")
    keep(comm, world, rows)
    with Pair(comm, world) as pair:
        assert pair.gpu.model.gpu_times.nccl_over_mpi, "the file was read"
        assert nccl_calls(pair, LARGE) == (2 if wanted == "nccl" else 0)
        assert "measured" not in pair.gpu.path


@pytest.mark.parametrize("who", [0, 3])
def test_where_one_rank_cannot_join_all_take_mpi_and_say_why(comm, monkeypatch, who):
    monkeypatch.setattr(stand_in_nccl, "CONNECT_SECONDS", 0.5)
    world, join = World.from_shape("2x2"), stand_in_nccl.StandInNccl.NcclCommunicator

    def fail(self, size, identifier, rank):
        if size == comm.size and comm.rank == who:
            raise RuntimeError("planted: no network adapter")
        return join(self, size, identifier, rank)

    monkeypatch.setattr(stand_in_nccl.StandInNccl, "NcclCommunicator", fail)
    keep(comm, world, NCCL_IF_LARGE)
    with Pair(comm, world) as pair:
        assert len(set(comm.allgather(pair.gpu.path))) == 1
        assert f"(measured {DATE} by mpistrat tune), but cannot join all ranks: world: NCCL could not join" in pair.gpu.path
        assert "cannot join all ranks: world: NCCL could not join" in explained(pair, LARGE)
        assert nccl_calls(pair, LARGE) == 0
        assert pair.library.aborted == len(pair.library.communicators) - 1, "only that of the node is left"


def test_one_shot_is_taken_up_to_the_measured_size_unless_a_setting_says_another(comm, monkeypatch):
    world = World.from_shape("1x4")
    keep(comm, world, ((1024, 1e-5, 2e-5), (4096, 1e-5, 2e-5), (16384, 2e-5, 1e-5)), ("one shot", "two shots"))
    for setting, limit, why in (
        ("", 4096, f"one shot up to 4 KiB (measured {DATE} by mpistrat tune)"),
        ("8KiB", 8192, "one shot up to 8 KiB (MPISTRAT_ONE_SHOT_BYTES)"),
        (None, 1 << 18, "one shot up to 256 KiB, which is assumed: mpistrat tune measures it"),
    ):
        monkeypatch.setenv("MPISTRAT_ONE_SHOT_BYTES", setting or "")
        monkeypatch.setenv("MPISTRAT_TUNING", "off" if setting is None else "auto")
        with Pair(comm, world, has_nccl=False) as pair:
            assert pair.gpu._gpu.executor.intra.one_shot_bytes == limit
            assert f"cuda_ipc inside nodes, {why} (nccl: " in pair.gpu.path
            for num_bytes in (4096, 16384):
                pair.compare(SUM, [values(num_bytes // 4, np.float32, pair.rank)])


class Slow:
    """A communicator that enqueues work on the GPU that takes a while, and returns at once."""

    def __init__(self, device, seconds):
        self.stream, self.seconds = device.current_stream(), seconds

    def all_reduce(self, op, arrays, options, out):
        assert not self.stream.waiting, "the GPU was not waited for"
        self.stream.put(lambda: time.sleep(self.seconds))


def test_what_is_timed_ends_when_the_gpu_has(comm):
    with stand_in(comm) as device:
        ways = {"mpi": Slow(device, 2e-3), "nccl": Slow(device, 1e-3 * (comm.rank == 1))}  # the slowest rank counts
        found = measure_on_gpus(comm, device, ways, 64)
    assert {16, 64} <= {row[0] for row in found.rows}
    assert all(mpi >= 2e-3 and nccl >= 1e-3 for _, mpi, nccl in found.rows)
    assert len(set(comm.allgather(found))) == 1


@pytest.mark.parametrize(("nodes", "has_nccl"), [("2x2", True), ("1x4", False)])
def test_two_ways_are_two(comm, nodes, has_nccl):
    with stand_in(comm, has_nccl):
        ways, refusal = gpu_ways(comm, World.from_shape(nodes))
        assert not refusal
        first, second = (each._gpu.executor.transports for each in ways.values())
        found = [(each.everywhere is not None, each.intra.one_shot_bytes) for each in (first, second)]
        assert found == ([(False, None), (True, None)] if has_nccl else [(False, sys.maxsize), (False, 0)])
        for each in ways.values():
            each.close()


def tune(comm, capfd, nodes, monkeypatch, has_nccl=True):
    """Run mpistrat tune on these ranks, in haste in host memory, and return what rank 0 printed."""
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", nodes)
    monkeypatch.setattr("mpistrat.tools.tune.measure", lambda comm, world, *_: [Measurement(world, "flat", 16, 1e-5)])
    with stand_in(comm, has_nccl):
        assert cli.main(["tune", "--max-bytes", "1KiB"]) == 0
    return capfd.readouterr().out


@pytest.mark.parametrize(
    ("nodes", "has_nccl", "ways"), [("2x2", True, ["mpi", "nccl"]), ("1x4", False, ["one shot", "two shots"])]
)
def test_tune_measures_both_ways_on_gpus_and_auto_goes_by_it(comm, kept, monkeypatch, capfd, nodes, has_nccl, ways):
    said = tune(comm, capfd, nodes, monkeypatch, has_nccl)
    if comm.rank == 0:
        [path] = kept.glob("*.json")
        found = json.loads(path.read_text())["gpus"]
        assert (found["device"], [*found["seconds"]]) == ("stand-in", ways)
        for ladder in found["seconds"].values():
            assert {"16", "64", "256", "1024"} <= set(ladder)
            assert all(0 < seconds < 60 for seconds in ladder.values())
        assert f"1 KiB: {ways[0]} " in said
        table = said[said.index("On stand-in: ") : said.index("Wrote ")]
        assert " ".join(table.splitlines()[2].split()) == f"size {' '.join(ways)} auto chooses"
        assert cli.main(["tune", "--show"]) == 0
        assert table.strip() in capfd.readouterr().out
        assert cli.main(["tune", "--show", "--json"]) == 0
        [shown] = json.loads(capfd.readouterr().out)
        assert shown["gpus"] == found
        assert set(shown["auto_chooses_on_gpus"]) == set(found["seconds"][ways[0]])
        assert set(shown["auto_chooses_on_gpus"].values()) <= set(ways)
        assert cli.main(["plan", "--world", nodes, "--bytes", "1MiB", "--device", "gpu"]) == 0
        assert f"measured       on stand-in, {nodes} block: " in capfd.readouterr().out
    with Pair(comm, World.from_shape(nodes), has_nccl) as pair:
        assert "by mpistrat tune)" in pair.gpu.path
        pair.compare(SUM, [values(5000, np.float32, pair.rank)])


@pytest.mark.parametrize(
    ("nodes", "has_nccl", "variable", "why"),
    [
        ("2x2", False, None, "NCCL cannot join all ranks: CuPy finds no libnccl"),
        ("2x2", True, ("MPISTRAT_INTER_TRANSPORT", "nccl"), "MPISTRAT_INTER_TRANSPORT is set, and decides"),
        ("1x4", True, None, "the ranks of the node use nccl, which has no other way"),
        ("1x4", False, ("MPISTRAT_ONE_SHOT_BYTES", "1KiB"), "MPISTRAT_ONE_SHOT_BYTES is set, and decides"),
    ],
)
def test_tune_says_why_nothing_was_measured_on_gpus(comm, kept, monkeypatch, capfd, nodes, has_nccl, variable, why):
    if variable:
        monkeypatch.setenv(*variable)
    said = tune(comm, capfd, nodes, monkeypatch, has_nccl)
    if comm.rank == 0:
        assert f"On GPUs nothing was measured but the number of links: {why}" in said
        [path] = kept.glob("*.json")
        assert "gpus" not in json.loads(path.read_text())
