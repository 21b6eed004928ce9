"""`mpistrat run` from start to end, and launches that fit no MPI."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mpistrat.launch.mpiexec import find_mpi
from tests.faults.jobs import LIMIT_SECONDS, PROLOGUE, ended
from tests.processes import TAKES_CTRL_C, patient, run_bounded, started

SECONDS = 120.0
MPISTRAT_RUN = [sys.executable, "-m", "mpistrat", "run"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pid").mkdir()
    return tmp_path


def test_run_starts_the_ranks_and_hands_on_their_code(folder: Path) -> None:
    program = "print(comm.rank, comm.size, sys.argv[1:], os.environ['MPISTRAT_VIRTUAL_NODES'])"
    (folder / "job.py").write_text(PROLOGUE + program)
    done = run_bounded([*MPISTRAT_RUN, "-n", "3", "--nodes", "2+1", "job.py", "-n", "x"], SECONDS)
    assert sorted(done.stdout.split("\n")) == ["", *(f"{rank} 3 ['-n', 'x'] 2+1" for rank in range(3))], done.stderr
    assert done.returncode == 0
    (folder / "package").mkdir()
    (folder / "package/job.py").write_text(PROLOGUE + "print(__name__, sys.argv[1:]); sys.exit(5 if comm.rank == 1 else 0)")
    done = run_bounded([*MPISTRAT_RUN, "-n", "2", "-m", "package.job", "--rate", "1"], SECONDS)
    assert (done.returncode, done.stdout) == (5, "__main__ ['--rate', '1']\n" * 2), done.stderr


@pytest.mark.parametrize("name", ["MPISTRAT_ABORT", "MPISTRAT_DEVICE", "MPISTRAT_STALL_SECONDS", "MPISTRAT_TRACEBACK"])
def test_a_setting_that_one_rank_cannot_read_at_its_start_is_told_to_all(folder: Path, name: str) -> None:
    program = f"""
        import os
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            os.environ["{name}"] = "ture"
        import mpistrat
        try:
            mpistrat.MultiWorkerMirroredStrategy()
        except mpistrat.errors.MpistratError as error:
            print("{name}='ture'" in str(error))
    """
    (folder / "job.py").write_text(textwrap.dedent(program))
    done = run_bounded([*MPISTRAT_RUN, "-n", "2", "job.py"], SECONDS)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


def test_a_traceback_needs_no_banner_of_open_mpi_and_an_abort_without_one_has_it_once(folder: Path) -> None:
    (folder / "job.py").write_text(PROLOGUE + "if comm.rank == 1: raise ValueError('planted')\nmine.Barrier()")
    done = run_bounded([*MPISTRAT_RUN, "-n", "2", "job.py"], SECONDS)
    assert done.returncode == 1
    assert "\0" not in done.stderr
    assert done.stderr.endswith("ValueError: planted\n")
    assert "MPI_ABORT was invoked" not in done.stderr
    (folder / "job.py").write_text(PROLOGUE + "if comm.rank == 1: comm.Abort(7)\nmine.Barrier()")
    done = run_bounded([*MPISTRAT_RUN, "-n", "2", "job.py"], SECONDS)
    assert done.returncode == 7
    if find_mpi().flavour.name == "Open MPI":
        assert done.stderr.count("MPI_ABORT was invoked on rank 1") == 1


def test_a_timeout_says_what_the_ranks_did_with_lines_tagged_and_hosts_named(folder: Path) -> None:
    name, separator = os.uname().nodename, " slots=" if find_mpi().flavour.name == "Open MPI" else ":"
    (folder / "hosts").write_text(f"{name}{separator}2\n")
    program = """
import mpistrat
strategy = mpistrat.MultiWorkerMirroredStrategy()
print("first line", flush=True)
if strategy.rank == 1:
    time.sleep(1000)
strategy.communicator.barrier()
"""
    (folder / "job.py").write_text(PROLOGUE + program)
    options = ["--tag-output", "--timeout", str(patient(3.0)), "--hostfile", "hosts"]
    began = time.monotonic()
    done = run_bounded([*MPISTRAT_RUN, "-n", "2", *options, "job.py"], SECONDS)
    assert time.monotonic() - began < patient(3.0) + LIMIT_SECONDS
    assert done.returncode == 124, done.stderr
    assert {line[:3] for line in done.stdout.splitlines() if "first line" in line} == {"[0]", "[1]"}
    assert re.search(r"^mpistrat run: the job has taken .*, its --timeout, and is ended$", done.stderr, re.MULTILINE)
    assert re.search(r"^job .*: 2 ranks, 2 of them on this host; it runs\n", done.stderr, re.MULTILINE)
    assert "\nrank 0 waits for rank 1\n" in done.stderr
    assert not ended(done, folder).leftovers()


def test_an_mpiexec_that_has_to_be_killed_leaves_no_shared_memory(folder: Path) -> None:
    program = "print(*re.findall(r'/dev/shm/sm_segment\\S+', open('/proc/self/maps').read()), flush=True)\ntime.sleep(1000)"
    (folder / "job.py").write_text("import re\n" + PROLOGUE + program)
    patched = "from mpistrat.launch import mpiexec; mpiexec._END_SECONDS = 0.0; "
    run = f"{patched}from mpistrat.tools.cli import main; raise SystemExit(main())"
    done = run_bounded([sys.executable, "-c", run, "run", "-n", "2", "--timeout", str(patient(3.0)), "job.py"], SECONDS)
    assert done.returncode == 124, done.stderr
    segments = set(map(Path, done.stdout.split()))
    assert segments or find_mpi().flavour.name != "Open MPI"
    assert not any(path.exists() for path in segments)


@pytest.mark.parametrize("kill", [os.killpg, os.kill], ids=["the group", "one process"])
def test_ctrl_c_ends_the_job(folder: Path, kill: Callable[[int, int], None]) -> None:
    (folder / "job.py").write_text(PROLOGUE + "print('up', flush=True)\nwhile True: mine.Barrier(); time.sleep(0.01)")
    argv, pipe = [*TAKES_CTRL_C, *MPISTRAT_RUN, "-n", "3", "job.py"], subprocess.PIPE
    with started(argv, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == "up"
        began = time.monotonic()
        kill(process.pid, signal.SIGINT)  # the terminal sends it to the whole foreground group
        out, err = process.communicate(timeout=SECONDS)
        assert time.monotonic() - began < LIMIT_SECONDS
    assert process.returncode == 130
    assert "mpistrat run: interrupted" in err.splitlines()
    assert "Traceback" not in err
    assert not ended(subprocess.CompletedProcess([], process.returncode, out, err), folder).leftovers()


def test_a_run_that_is_killed_takes_the_job_with_it(folder: Path) -> None:
    (folder / "job.py").write_text(PROLOGUE + "print('up', flush=True)\ntime.sleep(1000)")
    with started([*MPISTRAT_RUN, "-n", "2", "job.py"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == "up"
        process.kill()
        assert not ended(subprocess.CompletedProcess([], process.wait(), "", ""), folder).leftovers()


def test_what_an_mpiexec_that_was_killed_has_left_stops_no_later_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRTE_MCA_prte_tmpdir_base", str(folder))
    with subprocess.Popen(["true"]) as process:
        numbers = range(process.pid + 1, process.pid + 1001)
    for number in numbers:  # one of which mpiexec will have
        (folder / f"ompi.{number}").mkdir(mode=0o700)
        (folder / f"ompi.{number}/pmix.{os.uname().nodename}.tool").touch()
    (folder / "job.py").write_text("import os; print(os.getppid())")
    done = run_bounded([*MPISTRAT_RUN, "-n", "1", "job.py"], SECONDS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) in numbers, "a counter of processes that has begun again; run the test again"
