"""The scripts of slurm/ without a cluster: what they make of site.env, and what each launcher finds in its environment."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.processes import run_bounded

_SLURM = Path(__file__).parents[2] / "slurm"
_PAGE = _SLURM.parent / "docs" / "how-to" / "run-under-slurm.md"
_EXAMPLES = [block.text for block in blocks(_PAGE.read_text()) if block.text.startswith("# site.env")]
_LAUNCHER = '#!/bin/sh\necho "$(basename "$0") $*; cores ${SRUN_CPUS_PER_TASK-unset}"\n'


@pytest.fixture(params=sorted(_SLURM.glob("*.sbatch")), ids=lambda path: path.name)
def submit(request, tmp_path):
    """Give a function that runs a template as a job would, with this site.env, and launchers that tell what they got."""
    for name in ("srun", "mpirun", "mpiexec", "python"):
        launcher = tmp_path / "bin" / name
        launcher.parent.mkdir(exist_ok=True)
        launcher.write_text(_LAUNCHER)
        launcher.chmod(0o755)
    (tmp_path / "slurm").mkdir()
    script = shutil.copy(request.param, tmp_path / "slurm_script")

    def run(site, program=("train.py", "--name", "a b"), task="1"):
        if site is not None:
            (tmp_path / "slurm" / "site.env").write_text(site)
        environ = {name: value for name, value in os.environ.items() if name not in ("LAUNCH", "SRUN_CPUS_PER_TASK")}
        environ |= {
            "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_CPUS_PER_TASK": "4",
            "SLURM_NTASKS": "8",
            "SLURM_ARRAY_TASK_ID": task,
        }
        return run_bounded(["bash", str(script), *program], 30, environ)

    return run


@pytest.mark.parametrize(
    ("launch", "told"),
    [
        ("srun --mpi=pmix", "srun --mpi=pmix python train.py --name a b; cores 4"),
        # their daemons, started by srun, would be held to these cores
        ("mpirun", "mpirun python train.py --name a b; cores unset"),
        ("mpiexec", "mpiexec python train.py --name a b; cores unset"),
        ("mpirun --map-by slot:PE=$SLURM_CPUS_PER_TASK", "mpirun --map-by slot:PE=4 python train.py --name a b; cores unset"),
    ],
)
def test_only_srun_is_told_the_cores_of_a_rank(submit, launch, told):
    done = submit(f'LAUNCH="{launch}"\n')
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{told}\n"


@pytest.mark.parametrize("submit", [_SLURM / "requeue.sbatch"], indirect=True, ids=["requeue"])
@pytest.mark.parametrize("kills", ["-K", "-K1", "--kill-on-bad-exit", "--kill-on-bad-exit=1", ""])
@pytest.mark.parametrize("options", ["--mpi=pmix {}", "{} --cpu-bind=none apptainer exec --nv image"])
def test_the_first_rank_that_ends_with_42_ends_no_other(submit, tmp_path, options, kills):
    (tmp_path / "bin" / "srun").write_text('#!/bin/sh\necho "$SLURM_KILL_BAD_EXIT $SLURM_WAIT $*"\n')
    wanted, options = f"0 60 {options.format('')} python train.py --name a b", options.format(kills)
    assert submit(f'LAUNCH="srun {options}"\n').stdout.split() == wanted.split()


def test_a_site_may_read_what_is_unset_and_a_command_of_it_that_fails_ends_the_job(submit):
    done = submit('[ -z "$CONDA_SHLVL_OF_NOBODY" ]\nLAUNCH="srun"\n')
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("srun python train.py")
    done = submit('false\nLAUNCH="srun"\n')
    assert done.returncode != 0
    assert done.stdout == ""


@pytest.mark.parametrize("example", _EXAMPLES, ids=lambda text: text.partition(";")[0].removeprefix("# site.env "))
def test_examples_of_sites_start_the_program(submit, tmp_path, monkeypatch, example):
    for script in ("envs/training/bin/activate", "miniforge3/etc/profile.d/conda.sh"):
        (tmp_path / script).parent.mkdir(parents=True)
        (tmp_path / script).touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    done = submit(f"module() {{ :; }}\nconda() {{ :; }}\n{example}")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"srun --mpi=\w+ (-K )?.*python train.py --name a b; cores 4\n", done.stdout), done.stdout


def test_there_are_examples_and_each_says_that_it_is_untested():
    assert len(_EXAMPLES) == 5
    assert all("; untested\n" in example for example in _EXAMPLES)


@pytest.mark.parametrize("site", [None, "", "LAUNCH=\n"], ids=["no file", "unset", "empty"])
def test_without_a_launcher_mpistrat_finds_one(submit, site):
    done = submit(site)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "python -m mpistrat run -n 8 train.py --name a b; cores unset\n"


@pytest.mark.parametrize("submit", [_SLURM / "array.sbatch"], indirect=True, ids=["array"])
def test_a_task_without_a_program_says_so(submit, tmp_path):
    done = submit(None, [])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "the program is missing: it stands after the template, on the command line of sbatch\n"
    assert not (tmp_path / "task-1").exists()


@pytest.mark.parametrize("submit", [_SLURM / "array.sbatch"], indirect=True, ids=["array"])
@pytest.mark.parametrize(("task", "told"), [("0", ""), ("2", "train.py --rate 2"), ("3", "train.py")])
def test_a_task_has_its_line_of_arguments_or_ends(submit, tmp_path, task, told):
    (tmp_path / "sweep.txt").write_text("--rate 1\n--rate 2\n")
    done = submit("LAUNCH=srun\n", ["train.py"], task)
    assert done.stdout == (f"srun python {told}; cores 4\n" if told else "")
    assert (done.returncode == 0) == bool(told)
