"""mpistrat plan: what it prints, what it refuses, and that it needs no MPI."""

import os
import signal
import subprocess
import sys

import pytest

from mpistrat.algorithms.planners import hierarchical
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.tools import cli, plan
from mpistrat.topology.world import World
from tests.processes import TAKES_CTRL_C, run_bounded


def run(capsys, *words):
    return cli.main(["plan", *words]), *capsys.readouterr()


def test_the_report_shows_phases_bytes_and_why(capsys):
    code, out, err = run(capsys, "--world", "4x8", "--bytes", "64MiB")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "world 4x8: 32 ranks, 4 nodes, 8 shards" in lines
    cut = hierarchical(World.from_shape("4x8"), 2**24, 4)
    chunks = f"{cut.num_chunks} chunks of {format_bytes(cut.chunk_count * 4)}, {cut.depth} at a time"
    assert f"buffer 64 MiB of float32: 16777216 elements in {chunks}" in lines
    assert "algorithm hierarchical" in lines
    for start in (
        "why on such nodes hierarchical takes 288 KiB and more",
        "intra reduce_scatter 56 MiB 0 B",
        "inter all_reduce 12 MiB 96 MiB",
        "intra all_gather 56 MiB 0 B",
    ):
        assert any(line.startswith(start) for line in lines), start


SMALL = ("--world", "2x2", "--bytes", "1KiB")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--world", "3+1", "--bytes", "1KiB"), "3+1: 4 ranks, 2 nodes, 3 shards"),
        (("--world", "2x2:cyclic", "--bytes", "8"), "2x2:cyclic: 4 ranks, 2 nodes, 2 shards"),
        (("--world", "1x1", "--bytes", "0"), "0 B of float32: 0 elements"),
        (("--world", "2x2", "--bytes", "6", "--dtype", "bfloat16"), "6 B of bfloat16: 3 elements"),
        ((*SMALL, "--algorithm", "hierarchical"), "hierarchical was asked for by name; auto would choose flat"),
        (SMALL, "at least 1 KiB"),
        ((*SMALL, "--algorithm", "hierarchical"), "1 KiB of float32: 256 elements\nalgorithm  hierarchical"),
    ],
)
def test_any_world_size_and_dtype(capsys, words, expected):
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert expected in out


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_not_an_error(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mpistrat", "plan", "--world", "4x8", "--bytes", "1MiB"]
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environ, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_stdout_that_was_closed_or_cannot_encode_is_no_error():
    command = [sys.executable, "-m", "mpistrat", "plan", "--world", "2x2", "--bytes", "8"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    program = "from mpistrat.tools import cli, info; info.execute = lambda _: print('5 \\u00b5s') or 0; cli.main()"
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program, "info"], capture_output=True, env=environ, timeout=60, check=False)
    assert (done.stdout.rstrip(), done.stderr) == (rb"5 \xb5s", b"")


def test_one_rank_of_several_whose_reader_has_gone_ends_the_others_by_an_exception(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(plan, "execute", lambda _: (_ for _ in ()).throw(BrokenPipeError))
    with pytest.raises(BrokenPipeError):
        cli.main(["plan", "--world", "4x8", "--bytes", "8"])


def test_ctrl_c_while_modules_are_imported_prints_no_traceback(tmp_path):
    (tmp_path / "slow.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    add = "from mpistrat import tools; from mpistrat.tools import cli; tools.__path__ += ['.']; cli.COMMANDS['slow'] = ''"
    program = f"{add}; cli.main(['slow'])"
    done = run_bounded([*TAKES_CTRL_C, sys.executable, "-c", program], 60.0, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(1536), "1.5 KiB"),
        (format_bytes(1047 * 1000), "1022 KiB"),
        (format_bytes(2**20 - 512), "0.9995 MiB"),
        (format_bytes(2**20 - 1), "1 MiB"),
        (format_bytes(64 * 2**20), "64 MiB"),
        (format_bytes(3 * 2**30), "3 GiB"),
        (format_seconds(0), "0 s"),
        (format_seconds(2.5e-8), "25 ns"),
        (format_seconds(17e-6), "17 µs"),
        (format_seconds(0.00404), "4.04 ms"),
        (format_seconds(0.0009999), "1 ms"),
        (format_seconds(90), "90 s"),
        (format_count(1, "rank"), "1 rank"),
        (format_count(0, "rank"), "0 ranks"),
        (format_table([("a", "10"), ("bcd", "9")], right=[1]), "a    10\nbcd   9"),
    ],
)
def test_text(found, expected):
    assert found == expected
