"""``mpistrat bench`` and ``tune``: what they print, keep and show on several ranks, and what they refuse."""

import json
import textwrap
from types import SimpleNamespace

import pytest

from mpistrat.algorithms.planners import PLANNERS
from mpistrat.errors import DeadlineExceededError, SettingError
from mpistrat.settings import ALGORITHM
from mpistrat.tools import bench, cli
from tests.gpu.stand_in import UNFINISHED
from tests.gpu.stand_in_arrays import stand_in_gpu
from tests.processes import run_mpistrat


def test_the_table(monkeypatch, tmp_path):
    monkeypatch.setenv("MPISTRAT_TIMELINE", str(tmp_path / "trace.json"))
    done = run_mpistrat("bench", "all_reduce", "-n", "2", "--max-bytes", "1KiB")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"], "that of all ranks, whose watchers know each other"
    title, heads, *lines = done.stdout.splitlines()
    assert title.startswith("all_reduce of float32, SUM, World(1x2, 2 ranks on 1 node), ")
    assert heads.split() == ["size", "plan", "time", "MPI", "alg", "GB/s", "bus", "GB/s", "x", "MPI", "by"]
    assert [line.split()[:2] for line in lines] == [[str(size), "B"] for size in (8, 32, 128, 512)]
    assert {tuple(line.split()[10:]) for line in lines} == {("slots", "of", "shared", "memory")}


def test_json_holds_the_same_figures():
    done = run_mpistrat("bench", "all_reduce", "-n", "4", "--min-bytes", "64", "--max-bytes", "256", "--json")
    document = json.loads(done.stdout)
    assert [document[name] for name in ("collective", "dtype", "ranks", "world")] == ["all_reduce", "float32", 4, "1x4"]
    assert [row["nbytes"] for row in document["rows"]] == [64, 256]
    for row in document["rows"]:
        assert set(row) == set(bench.Row.__dataclass_fields__)
        assert row["plan"] in PLANNERS
        assert bench.MIN_BLOCKS * bench.MIN_ROUNDS <= row["rounds"] <= bench.MAX_BLOCKS * bench.MAX_ROUNDS
        assert row["algorithm_gbs"] == pytest.approx(row["nbytes"] / row["seconds"] / 1e9)
        assert row["bus_gbs"] == pytest.approx(1.5 * row["algorithm_gbs"]), "2 (n - 1) / n for 4 ranks"
        assert row["ratio"] == pytest.approx(row["mpi_seconds"] / row["seconds"])


def test_every_algorithm_is_measured_by_its_name(tmp_path):
    program = """
        from mpistrat.tools import bench, cli
        for algorithm in bench.ALGORITHMS:
            assert cli.main(["bench", "all_reduce", "--algorithm", algorithm, "--min-bytes", "64", "--max-bytes", "64"]) == 0
    """
    (tmp_path / "job.py").write_text(textwrap.dedent(program))
    done = run_mpistrat("run", "-n", "3", "--nodes", "2+1", str(tmp_path / "job.py"))
    auto, *plans = [line.split(maxsplit=10) for line in done.stdout.splitlines() if line.split()[:2] == ["64", "B"]]
    assert auto[2] in PLANNERS
    assert {words[2]: words[10] for words in plans} == {
        "flat": "slots of shared memory, messages between nodes",
        "hierarchical": "shared_memory inside the node, mpi between nodes",
        "mpi": "MPI_Allreduce",
    }


def test_names_of_algorithms_are_the_planners():
    assert ("auto", *PLANNERS, "mpi") == bench.ALGORITHMS
    with pytest.raises(SettingError) as caught:
        ALGORITHM.read({ALGORITHM.name: "?"})
    # settings lie below the algorithms, and name them once more
    assert f"; {', '.join(['auto', *PLANNERS])} are accepted. " in str(caught.value)
    for name in ("auto", *PLANNERS):
        assert ALGORITHM.read({ALGORITHM.name: name}) == name


def test_what_is_measured_on_a_gpu_has_a_deadline(monkeypatch):
    monkeypatch.setattr(bench, "DEADLINE_SECONDS", 0.05)
    with stand_in_gpu() as device:
        # a kernel that waits for a rank that does not come
        call = bench.timed(lambda: device.current_stream().put(lambda: UNFINISHED), SimpleNamespace(path="nccl inside nodes"))
        with pytest.raises(DeadlineExceededError, match=r"a call that is measured on GPUs did not end within 0\.05 s"):
            call()


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Give the folder in which files are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MPISTRAT_TUNING", "auto")
    return tmp_path / "mpistrat"


def test_it_measures_and_keeps_and_shows(kept, monkeypatch, capsys):
    done = run_mpistrat("tune", "-n", "2", "--max-bytes", "1KiB")
    [path] = kept.iterdir()
    assert f"\nWrote {path}. Programs use it automatically; MPISTRAT_TUNING=off ignores it" in done.stdout
    lines = done.stdout.splitlines()
    heads = next(line.split() for line in lines if line.startswith("size"))
    assert heads == ["size", "flat", "hierarchical", "auto", "chooses"]
    assert [line.split() for line in lines if line.startswith("ranks")] == [["ranks", "1x2", "block"]]
    for size in ("16 B", "64 B", "256 B", "1 KiB"):
        row = next(line.split() for line in reversed(lines) if line.startswith(f"{size} "))
        assert row[-1] in ("flat", "hierarchical")

    (kept / "other.json").write_text("{}")
    assert cli.main(["tune", "--show"]) == 0
    shown = capsys.readouterr().out
    assert f"{path}\n\ncluster " in shown
    assert f"{kept / 'other.json'}\nignored: it is not a file of mpistrat tune" in shown
    assert shown.endswith(f"2 files of mpistrat tune in {kept}\n")
    monkeypatch.setenv("MPISTRAT_TUNING", str(kept.parent / "other.json"))
    (kept / "other.json").rename(kept.parent / "other.json")
    assert cli.main(["tune", "--show"]) == 0
    shown = capsys.readouterr().out
    assert str(path) not in shown
    assert shown.endswith(f"1 file of mpistrat tune in {kept.parent}\n")


@pytest.mark.parametrize("words", [["tune"], ["bench", "all_reduce"]], ids=["tune", "bench"])
def test_what_one_rank_has_no_memory_for_ends_all_by_one_line(tmp_path, words):
    program = f"""
        import os, sys
        from mpi4py import MPI  # the others would wait there
        from mpistrat.tools import cli
        if MPI.COMM_WORLD.rank == 1:
            os.sysconf = lambda name: 2  # pages of 2 bytes
        code = cli.main({words})
        print("ended with", code, flush=True)
        sys.exit(code)
    """
    (tmp_path / "job.py").write_text(textwrap.dedent(program))
    done = run_mpistrat("run", "-n", "3", str(tmp_path / "job.py"), code=2)
    refused = f"mpistrat {words[0]}: rank 1: arrays of "
    assert [line[: len(refused)] for line in done.stderr.splitlines() if "mpistrat" in line] == [refused]
    assert "ended with 2" in done.stdout


def test_what_all_ranks_refuse_alike_is_said_once(monkeypatch):
    monkeypatch.setenv("MPISTRAT_INTRA_TRANSPORT", "nccl")
    done = run_mpistrat("bench", "all_reduce", "-n", "3", code=2)
    assert done.stderr.count("mpistrat bench: MPISTRAT_INTRA_TRANSPORT=nccl moves GPU memory, and ranks compute on CPUs") == 1


def test_one_rank_has_nothing_to_tune(kept):
    done = run_mpistrat("tune", "-n", "1", code=2)
    assert "a single rank has no other to communicate with; start more: mpistrat tune -n 4" in done.stderr
    assert not kept.exists()
