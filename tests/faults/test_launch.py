"""`mpistrat run` from start to end, and launches that fit no MPI."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpistrat.launch.mpiexec import find_mpi
from tests.faults.jobs import LIMIT_SECONDS, MPISTRAT_RUN, PROLOGUE, PYTHON
from tests.processes import patient, run_bounded, until

SECONDS = 120.0


def test_run_starts_the_ranks_and_hands_on_their_code(job):
    ended = job(3, "print(comm.rank, comm.size, os.environ['MPISTRAT_VIRTUAL_NODES'])", run=("--nodes", "2+1"))
    assert sorted(ended.stdout.splitlines()) == [f"{rank} 3 2+1" for rank in range(3)], ended.stderr
    assert ended.code == 0
    (job.folder / "package").mkdir()
    (job.folder / "package/job.py").write_text(PROLOGUE + "print(__name__, sys.argv[1:]); sys.exit(5 if comm.rank == 1 else 0)")
    done = run_bounded([*MPISTRAT_RUN, "-n", "2", "-m", "package.job", "-n", "x"], SECONDS, cwd=job.folder)
    assert (done.returncode, done.stdout) == (5, "__main__ ['-n', 'x']\n" * 2), done.stderr


# the device is bound once
@pytest.mark.parametrize("names", [["MPISTRAT_DEVICE"], ["MPISTRAT_ABORT", "MPISTRAT_STALL_SECONDS", "MPISTRAT_TRACEBACK"]])
def test_settings_that_one_rank_cannot_read_at_its_start_are_told_to_all(tmp_path, names):
    program = f"""
import os
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    os.environ.update(dict.fromkeys({names}, "ture"))
import mpistrat
for _ in {names}:
    try:
        mpistrat.MultiWorkerMirroredStrategy()
    except mpistrat.errors.MpistratError as error:
        [name] = [name for name in {names} if f"{{name}}='ture'" in str(error)]
        os.environ.pop(name, None)
        print(name)
"""
    (tmp_path / "job.py").write_text(program)
    done = run_bounded([*MPISTRAT_RUN, "-n", "2", "job.py"], SECONDS, cwd=tmp_path)
    assert (done.returncode, sorted(done.stdout.split())) == (0, sorted(2 * names)), done.stderr


def test_a_traceback_needs_no_banner_of_open_mpi_and_an_abort_without_one_has_it_once(job):
    ended = job(2, "if comm.rank == 1: raise ValueError('planted')\nmine.Barrier()", run=())
    ended.check(1)
    assert "\0" not in ended.stderr
    assert ended.stderr.endswith("ValueError: planted\n")
    assert "MPI_ABORT was invoked" not in ended.stderr
    ended = job(2, "if comm.rank == 1: comm.Abort(7)\nmine.Barrier()", run=())
    ended.check(7)
    if find_mpi().flavour.name == "Open MPI":
        assert ended.stderr.count("MPI_ABORT was invoked on rank 1") == 1


def test_a_timeout_says_what_the_ranks_did_with_lines_tagged_and_hosts_named(job):
    name, separator = os.uname().nodename, " slots=" if find_mpi().flavour.name == "Open MPI" else ":"
    (job.folder / "hosts").write_text(f"{name}{separator}2\n")
    program = """
        strategy = mpistrat.MultiWorkerMirroredStrategy()
        print("first line", flush=True)
        if strategy.rank == 1:
            time.sleep(1000)
        strategy.communicator.barrier()
    """
    began, seconds = time.monotonic(), patient(3.0)
    ended = job(2, program, run=("--tag-output", "--timeout", str(seconds), "--hostfile", "hosts"))
    ended.check(124)
    assert time.monotonic() - began < seconds + LIMIT_SECONDS
    assert {line[:3] for line in ended.stdout.splitlines() if "first line" in line} == {"[0]", "[1]"}
    assert re.search(r"^mpistrat run: the job has taken .*, its --timeout, and is ended$", ended.stderr, re.MULTILINE)
    assert re.search(r"^job .*: 2 ranks, 2 of them on this host; it runs\n", ended.stderr, re.MULTILINE)
    assert "\nrank 0 waits for rank 1\n" in ended.stderr


def test_an_mpiexec_that_has_to_be_killed_leaves_no_shared_memory(job):
    segments = "re.findall(r'/dev/shm/sm_segment\\S+', open('/proc/self/maps').read())"
    (job.folder / "job.py").write_text(f"import re\n{PROLOGUE}print(*{segments}, flush=True)\ntime.sleep(1000)")
    patched = "from mpistrat.launch import mpiexec; mpiexec._END_SECONDS = 0.0; "
    run = f"{patched}from mpistrat.tools.cli import main; raise SystemExit(main())"
    argv = [*PYTHON, "-c", run, "run", "-n", "2", "--timeout", str(patient(2.0)), "job.py"]
    done = run_bounded(argv, SECONDS, cwd=job.folder)
    assert done.returncode == 124, done.stderr
    found = set(map(Path, done.stdout.split()))
    assert found or find_mpi().flavour.name != "Open MPI"
    assert not any(path.exists() for path in found)


@pytest.mark.parametrize("kill", [os.killpg, os.kill], ids=["the group", "one process"])
def test_ctrl_c_ends_the_job(job, kill):
    def interrupt(run):
        assert until(lambda: "up" in job.said("out"), SECONDS)
        kill(run.pid, signal.SIGINT)  # the terminal sends it to the whole foreground group

    program = "note_fault(); print('up', flush=True)\nwhile True: mine.Barrier(); time.sleep(0.01)"
    ended = job(3, program, run=(), meanwhile=interrupt)
    ended.check(130)
    assert "mpistrat run: interrupted" in ended.stderr.splitlines()
    assert "Traceback" not in ended.stderr


def test_a_run_that_is_killed_takes_the_job_with_it(job):
    def kill(run):
        assert until(lambda: "up" in job.said("out"), SECONDS)
        run.kill()

    job(2, "print('up', flush=True)\ntime.sleep(1000)", run=(), meanwhile=kill).check(-signal.SIGKILL)


def test_what_an_mpiexec_that_was_killed_has_left_stops_no_later_one(job):
    with subprocess.Popen(["true"]) as process:
        numbers = range(process.pid + 1, process.pid + 1001)
    for number in numbers:  # one of which mpiexec will have
        (job.folder / f"ompi.{number}").mkdir(mode=0o700)
        (job.folder / f"ompi.{number}/pmix.{os.uname().nodename}.tool").touch()
    ended = job(1, "print(os.getppid())", run=(), PRTE_MCA_prte_tmpdir_base=str(job.folder))
    ended.check(0)
    assert int(ended.stdout) in numbers, "a counter of processes that has begun again; run the test again"
