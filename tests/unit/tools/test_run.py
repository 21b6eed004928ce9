"""`mpistrat run`: its arguments, the command it prints, and what it refuses."""

import argparse
import math
import os
import sys
from pathlib import Path

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch import environment, mpiexec, openmpi
from mpistrat.launch.environment import FLAVOURS
from mpistrat.launch.mpiexec import Ended, Killed
from mpistrat.tools import cli, doctor, run

EXTRA = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_osc": "^ucx", "OMPI_MCA_opal_signal": "", "OMP_NUM_THREADS": "2"}


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    """A script in the present folder, and a machine with four cores and the Open MPI wheel."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("OMPI_", "OMP_", "SLURM_", "MPISTRAT_"))]:
        monkeypatch.delenv(name)
    mpi = mpiexec.Mpi(FLAVOURS[0], "/opt/my mpi/mpiexec", "5.0", "libmpi.so")
    monkeypatch.setattr(mpiexec, "find_mpi", lambda: mpi)
    monkeypatch.setattr(openmpi, "num_cores", lambda: 4)
    monkeypatch.setattr(openmpi, "has_wheel", lambda _: True)
    monkeypatch.setattr(openmpi, "_names_in_file", lambda _: set())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    path = tmp_path / "train.py"
    path.touch()
    return path


def execute(*words):
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return run.execute(parser.parse_args(words))


def test_dry_run_prints_a_command_to_copy(capsys):
    assert execute("-n", "2", "--nodes", "2x1", "--dry-run", "train.py", "--name", "a b") == 0
    assert capsys.readouterr().out == (
        "OMPI_MCA_btl='^ofi' OMPI_MCA_osc='^ucx' OMPI_MCA_opal_signal='' MPISTRAT_VIRTUAL_NODES=2x1 OMP_NUM_THREADS=2 "
        f"'/opt/my mpi/mpiexec' -n 2 {sys.executable} -m mpi4py train.py --name 'a b'\n"
    )


def test_job_is_started_and_its_code_is_ours_and_inside_a_job_is_refused(monkeypatch):
    started = []
    monkeypatch.setattr(run, "follow", lambda *arguments: started.append(arguments) or Ended(7))
    assert execute("-n", "2", "train.py") == 7
    [(argv, environ, timeout, _)] = started
    assert timeout == math.inf
    assert argv == ["/opt/my mpi/mpiexec", "-n", "2", sys.executable, "-m", "mpi4py", "train.py"]
    assert environ == {**os.environ, **EXTRA}
    execute("-n", "2", "--timeout", "2:00:00", "train.py")
    assert started[1][2] == 7200.0
    for size, number in ((4, "4"), (None, "several")):  # PMIx alone tells no size
        monkeypatch.setattr(environment, "detect", lambda size=size: environment.LauncherView("srun", 1, size, 1, 2))
        with pytest.raises(LaunchError) as caught:
            execute("-n", "2", "train.py")
        assert str(caught.value) == (
            f"this is rank 1 of {number} that srun started, and each rank would start a job. Call mpistrat once, outside the "
            "job; or leave it out, and start the script with that launcher."
        )


@pytest.mark.parametrize(
    ("words", "environ", "threads"),
    [
        (("-n", "4"), {}, "OMP_NUM_THREADS=1 "),
        (("-n", "9"), {}, "OMP_NUM_THREADS=1 "),
        (("-n", "1"), {}, ""),
        (("-n", "2"), {"OMP_NUM_THREADS": "3"}, ""),
        (("-n", "2"), {"SLURM_JOB_ID": "7"}, ""),
        (("-n", "2", "--hostfile", "train.py"), {}, ""),
    ],
)
def test_ranks_of_this_machine_share_its_cores(capsys, monkeypatch, script, words, environ, threads):
    script.write_text("node1\n")  # a hostfile too
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert execute(*words, "--dry-run", "train.py") == 0
    before, found, after = capsys.readouterr().out.partition("OMP_NUM_THREADS")
    assert (found + after).startswith(threads) if threads else not found
    assert before


def test_options_of_mpiexec_are_made_for_the_mpi(tmp_path, capsys):
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    assert execute("-n", "2", "--tag-output", "--hostfile", "hosts", "--timeout", "10m", "--dry-run", "train.py") == 0
    assert "/mpiexec' -n 2 --output rank --hostfile hosts " in capsys.readouterr().out
    execute("--nodes", "2+1:cyclic", "--dry-run", "train.py")  # which tells the number of ranks
    assert "MPISTRAT_VIRTUAL_NODES=2+1:cyclic OMP_NUM_THREADS=1 '/opt/my mpi/mpiexec' -n 3 " in capsys.readouterr().out


def test_a_timeout_is_reported_with_what_the_ranks_do(monkeypatch, capsys):
    monkeypatch.setattr(run, "follow", lambda _argv, _environ, _timeout, on_timeout: on_timeout(7) or Ended(124))
    monkeypatch.setattr(doctor, "describe", lambda pid: f"ranks of {pid}" if pid else "")
    assert execute("-n", "2", "--timeout", "2m", "train.py") == 124
    said = "mpistrat run: the job has taken 2 min 0 s, its --timeout, and is ended\n"
    assert capsys.readouterr().err == f"{said}ranks of 7\n"
    monkeypatch.setattr(doctor, "describe", lambda _: "")
    execute("-n", "2", "--timeout", "2m", "train.py")
    nothing = "What its ranks were doing is not known: none on this host has made a strategy.\n"
    assert capsys.readouterr().err == f"{said}{nothing}"


def test_a_restart_says_how_the_job_has_ended(monkeypatch, capsys):
    ends = [Ended(124, timed_out=True), Ended(42), Ended(1, failed="rank 3 on vm"), Ended(139, killed=Killed(7, "other", 11))]
    counts, before = [], dict(os.environ)
    monkeypatch.setattr(
        run, "follow", lambda _argv, environ, *_: counts.append(environ["MPISTRAT_RESTART_COUNT"]) or ends[len(counts) - 1]
    )
    assert execute("-n", "2", "--max-restarts", "9", "--restart-delay", "0", "--timeout", "2m", "train.py") == 1
    assert counts == ["0", "1", "2"]
    ends[1] = Ended(0)
    ends[0], counts[:] = ends[3], []
    assert execute("-n", "2", "--max-restarts", "9", "--restart-delay", "0", "train.py") == 0
    none = "no checkpoint was saved since it started"
    assert capsys.readouterr().err.splitlines() == [
        f"mpistrat run: restart 1 of 9: the job has taken 2 min 0 s; {none}",
        f"mpistrat run: restart 2 of 9: the job was preempted; {none}",
        f"mpistrat run: not started again, because it failed twice without progress: rank 3 on vm ended with code 1; {none}",
        "mpistrat run: process 7 on other was ended by signal 11 (Segmentation fault), and the other ranks with it",
        f"mpistrat run: restart 1 of 9: process 7 on other was ended by signal 11; {none}",
    ]
    assert dict(os.environ) == before, "the next job of this process is not one that is started again"


def test_ranks_on_other_hosts_are_told_where_progress_is(monkeypatch, script):
    script.write_text("node1\n")  # a hostfile too
    commands = []
    monkeypatch.setattr(run, "follow", lambda argv, environ, *_: commands.append((argv, environ)) or Ended(0))
    assert execute("-n", "2", "--hostfile", "train.py", "--max-restarts", "1", "train.py") == 0
    [(argv, environ)] = commands
    assert Path(environ["MPISTRAT_PROGRESS_FILE"]).parent == Path.cwd()
    assert "-x MPISTRAT_FIRST_START -x MPISTRAT_PROGRESS_FILE -x MPISTRAT_RESTART_COUNT" in " ".join(argv)


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("-n 2 --dry-run train.py -np 7", "-n 2 {} -m mpi4py train.py -np 7"),
        *((f"{two} --dry-run train.py", "-n 2 {} -m mpi4py train.py") for two in ("-n2", "-np 2", "--ranks 2", "--ranks=2")),
        ("-n 1 --dry-run train.py -n 9 --nodes x --dry-run", "-n 1 {} train.py -n 9 --nodes x --dry-run"),
        ("-n 1 --dry-run -m json.tool --rate 1 -m x", "-n 1 {} -m json.tool --rate 1 -m x"),
        ("-n 1 --dry-run -- train.py -- x", "-n 1 {} train.py -- x"),
        ("-n 1 --dry-run -- -m train", "-n 1 {} -m train"),
        ("-n 1 --dry-run -- train.py", "-n 1 {} train.py"),
    ],
)
def test_options_end_with_the_program(capsys, words, end):
    assert cli.main(["run", *words.split()]) == 0
    assert capsys.readouterr().out.endswith(f"mpiexec' {end.format(sys.executable)}\n")
