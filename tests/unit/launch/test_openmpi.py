"""What we ask of Open MPI, and that the user's word goes first."""

import os
import pwd
import sys
from importlib import metadata
from pathlib import Path

import pytest

from mpistrat.launch import openmpi
from mpistrat.launch.openmpi import has_chosen_collectives, has_wheel, num_cores, parameters
from tests.processes import run_bounded

QUICK_START = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_osc": "^ucx"}
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmpi, "has_wheel", lambda _: True)


@pytest.mark.usefixtures("wheel")
def test_wheel_starts_quickly_and_yields_where_oversubscribed() -> None:
    assert parameters({}, oversubscribed=False) == QUICK_START
    assert parameters({}, oversubscribed=True) == {**QUICK_START, **YIELD}


def test_without_home_mpi_starts_all_the_same() -> None:
    without = {name: value for name, value in os.environ.items() if name != "HOME"}
    inner = "import os; from mpistrat.launch.bootstrap import start; print(start().size, os.environ['HOME'])"
    outer = "from mpistrat.launch import mpiexec; mpiexec.find_mpi()"
    for program, said in ((inner, f"1 {pwd.getpwuid(os.getuid()).pw_dir}\n"), (outer, "")):
        done = run_bounded([sys.executable, "-c", program], 60, without)
        assert (done.returncode, done.stdout) == (0, said), done.stderr


@pytest.mark.usefixtures("wheel")
def test_a_process_alone_shares_no_memory_unless_the_user_says_so() -> None:
    assert parameters({}, oversubscribed=False, alone=True) == {**QUICK_START, "OMPI_MCA_btl": "^ofi,sm"}
    assert parameters({"OMPI_MCA_btl": "self,sm"}, oversubscribed=False, alone=True) == {"OMPI_MCA_osc": "^ucx"}


def test_another_open_mpi_is_left_as_the_site_built_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmpi, "has_wheel", lambda _: False)
    assert parameters({}, oversubscribed=False) == {}
    assert parameters({}, oversubscribed=True) == YIELD


@pytest.mark.usefixtures("wheel")
@pytest.mark.parametrize("choice", ["self,sm,tcp", "^tcp", ""])
def test_variable_of_the_user_stays(choice: str) -> None:
    assert parameters({"OMPI_MCA_btl": choice}, oversubscribed=False) == {"OMPI_MCA_osc": "^ucx"}


@pytest.mark.usefixtures("wheel")
def test_parameter_file_of_the_user_stays(tmp_path: Path) -> None:
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi/mca-params.conf").write_text("# osc = rdma\nbtl = tcp,self\n\nmpi_yield_when_idle=0\n")
    assert parameters({"HOME": str(tmp_path)}, oversubscribed=True) == {"OMPI_MCA_osc": "^ucx"}


def test_library_named_by_the_user_is_not_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openmpi-5.0.11.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", ["/nowhere", __file__, str(tmp_path)])
    assert has_wheel({})
    assert not has_wheel({"MPI4PY_LIBMPI": "/opt/mpi/lib/libmpi.so"})


def test_without_the_wheel_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openmpi_tools-1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert not has_wheel({})


def test_the_wheel_is_found_where_python_finds_it() -> None:
    try:
        metadata.distribution("openmpi")
    except metadata.PackageNotFoundError:
        assert not has_wheel({})
    else:
        assert has_wheel({})


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert num_cores(range(4), tmp_path) == 2
    assert num_cores([0, 2], tmp_path) == 1
    assert num_cores(range(4), tmp_path / "unknown") == 4


def test_cores_of_the_parent_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    masks = {0: {1}, os.getppid(): {0, 1, 2, 3}}  # a rank bound to one core by a launcher that is free
    monkeypatch.setattr(os, "sched_getaffinity", masks.__getitem__)
    assert num_cores(system=tmp_path) == 4


def test_collectives_of_the_user_are_noticed(tmp_path: Path) -> None:
    assert not has_chosen_collectives({"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_collision": "1", "HOME": str(tmp_path)})
    assert has_chosen_collectives({"OMPI_MCA_coll": "^han"})
    assert has_chosen_collectives({"OMPI_MCA_coll_tuned_use_dynamic_rules": "1"})
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi/mca-params.conf").write_text("coll_han_priority = 0\n")
    assert has_chosen_collectives({"HOME": str(tmp_path)})
