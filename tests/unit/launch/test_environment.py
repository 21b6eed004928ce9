"""Recorded variables of each launcher -> what we read from them."""

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch.environment import LauncherView, detect, in_slurm_allocation


def variables(text):
    """Return variables that are written as env prints them."""
    return dict(word.split("=") for word in text.split())


# One rank of 2 nodes x 2 ranks each, recorded on a SLURM 22.05 cluster.
BATCH_SHELL = variables("SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0 SLURM_NTASKS=4")
BATCH_SHELL |= variables("SLURM_NTASKS_PER_NODE=2 SLURM_TASKS_PER_NODE=2(x2)")
STEP = "SLURM_STEP_ID={} SLURM_STEP_NUM_TASKS={} SLURM_STEP_TASKS_PER_NODE={}"
SRUN = BATCH_SHELL | variables(f"SLURM_PROCID=2 SLURM_NODEID=1 SLURM_GTIDS=2,3 {STEP.format(0, 4, '2(x2)')}")
OPEN = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
OPEN_MPI = variables(f"{OPEN} PMIX_RANK=3 PMIX_NAMESPACE=prterun-slurm0-120@1")
# what srun gives mpirun's daemon on the second node, and the daemon hands on to its ranks
DAEMON = BATCH_SHELL | variables(f"SLURM_NTASKS=1 {STEP.format(3, 1, 1)}")
HYDRA = variables("PMI_RANK=3 PMI_SIZE=4 PMI_FD=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
PROXY = DAEMON | variables("SLURM_PROCID=1 SLURM_GTIDS=1 SLURM_STEP_ID=4 SLURM_STEP_NUM_TASKS=2")
PALS = "PALS_RANKID=1 PMI_RANK=1 PMI_SIZE=4 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=2"

RECORDED = {
    "a shell": ({"HOME": "/root"}, None),
    "the shell of a batch script": (BATCH_SHELL, None),
    "the interactive step of salloc": ({**BATCH_SHELL, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"}, None),
    "srun --mpi=none": (SRUN, LauncherView("srun", 2, 4, 0, 2)),
    "srun --mpi=pmix": ({**SRUN, "PMIX_RANK": "2"}, LauncherView("srun", 2, 4, 0, 2)),
    "srun --mpi=pmi2": ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"}, LauncherView("srun", 2, 4, 0, 2)),
    "srun, alone on its node": ({**SRUN, "SLURM_PROCID": "3", "SLURM_GTIDS": "3"}, LauncherView("srun", 3, 4, 0, 1)),
    "mpirun of Open MPI": (OPEN_MPI, LauncherView("Open MPI's mpiexec", 3, 4, 1, 2)),
    "mpirun of Open MPI in a batch script": ({**DAEMON, **OPEN_MPI}, LauncherView("Open MPI's mpiexec", 3, 4, 1, 2)),
    "mpiexec of MPICH": (HYDRA, LauncherView("hydra's mpiexec", 3, 4, 1, 2)),
    "mpiexec of MPICH in a batch script": ({**PROXY, **HYDRA}, LauncherView("hydra's mpiexec", 3, 4, 1, 2)),
    "mpirun_rsh of MVAPICH": (variables(OPEN.replace("OMPI_", "MV2_")), LauncherView("MVAPICH's mpirun_rsh", 3, 4, 1, 2)),
    "PALS": (variables(PALS), LauncherView("PALS", 1, 4, 1, 2)),
    "mpiexec.gforker": ({"PMI_RANK": "1", "PMI_SIZE": "4"}, LauncherView("a PMI launcher", 1, 4)),
    "prun": ({"PMIX_RANK": "1"}, LauncherView("a PMIx launcher", 1)),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_variables_give_the_place(name):
    environ, expected = RECORDED[name]
    assert detect(environ) == expected


def test_the_process_is_read_by_default_and_an_allocation_is_known_by_its_job(monkeypatch):
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert detect() == LauncherView("Open MPI's mpiexec", 3, 4, 1, 2)
    assert in_slurm_allocation(BATCH_SHELL)
    assert not in_slurm_allocation(HYDRA)


@pytest.mark.parametrize("size", ["four", "²"])
def test_variable_that_is_not_a_number_is_named(size):
    with pytest.raises(LaunchError) as caught:
        detect({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": size})
    assert str(caught.value) == (
        f"OMPI_COMM_WORLD_SIZE={size!r} was found, but Open MPI's mpiexec sets this variable to a number; "
        "unset it if it was set by hand, and start with mpistrat run, mpiexec or srun"
    )
