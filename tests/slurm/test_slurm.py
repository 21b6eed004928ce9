"""The templates of slurm/ on a real cluster of two nodes: each MPI in each way that the table in slurm/README.md names."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.processes import until

_ROOT = Path(__file__).parents[2]
_PROGRAMS = Path(__file__).parent / "programs"
_PROGRAM = _PROGRAMS / "all_reduce.py"
# mpirun would bind each rank to a core of its own, and the nodes claim more cores than the machine has.
_MPIRUN = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_hwloc_default_binding_policy=none"
_PMIX, _TWO = "srun --mpi=pmix -K", "--ntasks-per-node=2"
_ON_ONE, _ON_ALL = "4 ranks on node0:4, sum right: True", "8 ranks on node0:4+node1:4, sum right: True"
_ON_TWO = "4 ranks on node0:2+node1:2, sum right: True"


@pytest.fixture
def begin(cluster, tmp_path):
    """Give a function that submits a template from a project's folder, and returns the job's number.

    Without a launcher there is no site.env: the template runs as it comes, in the environment that is active at submission.
    """

    def run(template, bin_folder, launch="", *options, site="", arguments=(), folder=tmp_path):
        shutil.copytree(_ROOT / "slurm", folder / "slurm", ignore=shutil.ignore_patterns("site.env"), dirs_exist_ok=True)
        if not (folder / "train.py").exists():
            shutil.copy(_PROGRAM, folder / "train.py")
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        if launch:
            lines = [site, f'export PATH="{path}" PYTHONPATH="{_ROOT}"', f'LAUNCH="{launch}"']
            (folder / "slurm" / "site.env").write_text("\n".join(lines) + "\n")
        environ = {} if launch else {"PATH": path, "PYTHONPATH": str(_ROOT)}
        return cluster.submit([*options, f"slurm/{template}", "train.py", *arguments], folder, environ)

    return run


@pytest.fixture
def submit(cluster, begin, tmp_path):
    """Give a function that submits a template as `begin` does, and returns the job's state and output."""

    def run(*arguments, **options):
        job = begin(*arguments, **options)
        return cluster.wait(job), (tmp_path / f"mpistrat-{job}.out").read_text()

    return run


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_template_runs_as_it_comes(submit, request, mpi):
    state, output = submit("many_nodes.sbatch", request.getfixturevalue(f"{mpi}_bin"))
    assert state == "COMPLETED", output
    assert _ON_ALL in output


# the template, the MPI, its launcher, an option of sbatch, what the site needs, and what the program says
WAYS = {
    "one node by srun": ("one_node", "openmpi", _PMIX, "--gpus-per-node=4", "", f"{_ON_ONE}, GPUs: 0,1,2,3"),
    "Open MPI by srun": ("many_nodes", "openmpi", _PMIX, "--gpus-per-node=4", "", f"{_ON_ALL}, GPUs: 0,1,2,3"),
    "Open MPI by mpirun": ("many_nodes", "openmpi", "mpirun", _TWO, _MPIRUN, _ON_TWO),
    # SLURM 22.05 cuts the long addresses that UCX has with all its transports, in some environments and not in others
    "MPICH by srun": ("many_nodes", "mpich", "srun --mpi=pmi2 -K", _TWO, "export UCX_TLS=tcp,self,sm", _ON_TWO),
    "MPICH by mpiexec": ("many_nodes", "mpich", "mpiexec", _TWO, "export SLURM_MPI_TYPE=none", _ON_TWO),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_program_runs_in_every_way(submit, request, way):
    template, mpi, launch, option, site, said = WAYS[way]
    state, output = submit(f"{template}.sbatch", request.getfixturevalue(f"{mpi}_bin"), launch, option, site=site)
    assert state == "COMPLETED", output
    assert said in output


@pytest.fixture
def begin_steps(begin, tmp_path):
    """Give a function that begins a job which counts steps, and returns its number and its output when it has begun."""

    def run(bin_folder, launch="", *options, site="", folder=tmp_path):
        folder.mkdir(exist_ok=True)
        shutil.copy(_PROGRAMS / "requeue.py", folder / "train.py")
        output = folder / "steps.out"
        before = output.read_text() if output.exists() else ""
        job = begin("requeue.sbatch", bin_folder, launch, *options, f"--output={output}", site=site, folder=folder)

        assert until(lambda: output.exists() and " begin at step " in output.read_text().removeprefix(before), 60), output
        return job, output

    return run


def check_steps(output, *places):
    """Check that each run of a job has begun in its place, where the one before has stopped, and that the last has ended."""
    text = output.read_text()
    stopped = re.findall(r"the job stops after step (\d+), which is saved", text)
    wanted = [f"{place} begin at step {step}" for place, step in zip(places, ["0", *stopped], strict=False)]
    assert re.findall(r".* begin at step \d+", text) == wanted, text
    assert re.search(r"all \d+ steps counted: True\n\Z", text), text


# the MPI, its launcher, what the site needs, and who is told: the batch script, as before the time limit, or the ranks
TOLD = {
    "the batch script": ("openmpi", "", "", "--batch"),
    "the ranks": ("mpich", "srun --mpi=pmi2 -K", "export UCX_TLS=tcp,self,sm", ""),
}


def test_jobs_that_are_told_of_their_limit_continue(cluster, begin_steps, request, tmp_path):
    jobs = {}
    for told, (mpi, launch, site, _) in TOLD.items():
        jobs[told] = begin_steps(request.getfixturevalue(f"{mpi}_bin"), launch, _TWO, site=site, folder=tmp_path / mpi)
    for told, (job, _) in jobs.items():
        cluster.run(["scancel", *filter(None, [TOLD[told][3]]), "--signal=USR1", str(job)])
    cluster.restart(*(job for job, _ in jobs.values()))
    for job, output in jobs.values():
        assert cluster.wait(job) == "COMPLETED", output.read_text()
        check_steps(output, "4 ranks on 2 nodes", "4 ranks on 2 nodes")


def test_a_job_that_is_preempted_continues_on_another_number_of_nodes(cluster, begin_steps, openmpi_bin):
    job, output = begin_steps(openmpi_bin, _PMIX, _TWO, "--exclusive")
    urgent = cluster.submit(["--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", "--output=urgent"], output.parent)
    assert cluster.wait(urgent) == "COMPLETED"
    assert cluster.state(job) == "PENDING"
    cluster.run(["scancel", str(job)])
    later, _ = begin_steps(openmpi_bin, _PMIX, _TWO, "--nodes=1")
    assert cluster.wait(later) == "COMPLETED", output.read_text()
    assert "has received SIGTERM" in output.read_text()
    check_steps(output, "4 ranks on 2 nodes", "2 ranks on 1 nodes")


def test_a_job_that_fails_does_not_go_back_into_the_queue(submit, openmpi_bin, tmp_path):
    (tmp_path / "train.py").write_text("import sys, mpistrat; mpistrat.MultiWorkerMirroredStrategy(); sys.exit(3)")
    assert submit("requeue.sbatch", openmpi_bin, "", _TWO)[0] == "FAILED"


def test_what_a_test_leaves_is_cancelled_before_the_next_one(cluster, tmp_path):
    sleep = ["--nodes=2", "--exclusive", "--wrap=sleep 1000", "--output=/dev/null"]
    running, waiting = cluster.submit(sleep, tmp_path), cluster.submit(sleep, tmp_path)
    assert until(lambda: cluster.state(running) == "RUNNING", 60)
    cluster.cancel_all()
    assert [cluster.wait(job, 30) for job in (running, waiting)] == ["CANCELLED"] * 2


_SWEEP = """
import sys, pathlib
import mpistrat

if mpistrat.MultiWorkerMirroredStrategy().is_chief:
    pathlib.Path("result").write_text(" ".join(sys.argv[1:]))
"""


def test_each_task_of_an_array_has_its_folder_and_arguments(cluster, begin, mpich_bin, tmp_path):
    (tmp_path / "train.py").write_text(_SWEEP)
    (tmp_path / "sweep.txt").write_text("--rate 0.1 --depth 3\n--rate 0.2\n")
    job = begin("array.sbatch", mpich_bin, "", "--array=1-2", "--ntasks-per-node=2", arguments=("--epochs", "5"))
    cluster.wait(job)
    said = [path.read_text() for path in sorted(tmp_path.glob(f"mpistrat-{job}_*.out"))]
    results = [tmp_path / f"task-{number}" / "result" for number in (1, 2)]
    assert [path.read_text() for path in results if path.exists()] == [
        "--epochs 5 --rate 0.1 --depth 3",
        "--epochs 5 --rate 0.2",
    ], said


_SUM = """
import mpistrat

def program(coordinator):
    with coordinator.strategy.scope():
        total = mpistrat.Variable(0)
    for number in range(100):
        coordinator.schedule(lambda number: total.assign_add(number, read_value=False), (number,))
    coordinator.join()
    print(coordinator.strategy, coordinator.strategy.client.channel.names, int(total))

resolver = mpistrat.cluster_resolver.SlurmClusterResolver({"chief": 1, "ps": 2, "worker": 5})
mpistrat.experimental.ParameterServerStrategy.main(program, resolver)
"""


def test_parameter_servers_are_on_several_nodes(submit, openmpi_bin, tmp_path):
    (tmp_path / "train.py").write_text(_SUM)
    state, output = submit("parameter_server.sbatch", openmpi_bin, _PMIX)
    assert state == "COMPLETED", output
    assert "(5 workers, 2 servers)" in output
    assert "'chief 0 (rank 0 on node0)', 'ps 0 (rank 1 on node1)', 'ps 1 (rank 2 on node0)'" in output
    assert output.rstrip().endswith(" 4950")


@pytest.mark.parametrize(
    ("mpi", "wrong", "advice"), [("openmpi", "none", "pmix"), ("openmpi", "pmi2", "pmix"), ("mpich", "none", "pmi2 for MPICH")]
)
def test_a_wrong_mpi_type_is_caught_with_the_right_advice(submit, request, mpi, wrong, advice):
    state, output = submit("many_nodes.sbatch", request.getfixturevalue(f"{mpi}_bin"), f"srun --mpi={wrong} -K", _TWO)
    assert state == "FAILED"
    assert f"--mpi={advice}" in output
    assert "sum right" not in output
    if mpi == "openmpi":
        assert "srun started 4 ranks, but MPI (Open MPI" in output
        assert "formed worlds of 1" in output


def test_a_rank_that_fails_ends_the_job(submit, openmpi_bin, tmp_path):
    program = f"{_PROGRAM.read_text()}\nif comm.rank == 3:\n    raise ValueError('planted')\ncomm.Barrier()\n"
    (tmp_path / "train.py").write_text(program)
    state, output = submit("many_nodes.sbatch", openmpi_bin, _PMIX, _TWO)
    assert state == "FAILED"
    assert output.count("ValueError: planted") == 1


def test_pytest_runs_under_srun_too(cluster, openmpi_bin):
    argv = ["srun", "--mpi=pmix", "-K", "-N2", "--ntasks-per-node=1", str(openmpi_bin / "python"), "-m", "pytest"]
    done = cluster.run([*argv, "-p", "no:cacheprovider", "tests/ranks/test_agreement.py"], cwd=_ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" passed") == 1, "only rank 0 prints"


@pytest.mark.parametrize("template", sorted((_ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_templates_keep_the_rules(template):
    text = template.read_text()
    lines = text.splitlines()
    assert len(lines) <= 40
    assert "set -euo pipefail" in lines
    directives = [line for line in lines if line.startswith("#SBATCH")]
    named = ("--job-name",)
    assert [line for line in directives if "# " not in line[1:] and not any(name in line for name in named)] == []
    options = " ".join(line.split("#")[1] for line in directives)
    assert "--ntasks-per-node=" in options
    assert "--gpus" not in options, "a cluster without GPUs would refuse it"
    code = "".join(line for line in lines if not line.startswith("#"))
    assert "/" not in code.replace("slurm/site.env", ""), "a path"


def test_the_example_of_the_site_names_the_launcher():
    text = (_ROOT / "slurm" / "site.env.example").read_text()
    assert 'LAUNCH="srun --mpi=pmix -K"' in text.splitlines()
