"""The replica context outside all scopes: alone it is quiet; in a job of several ranks it says that it combines nothing."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

import mpistrat
from mpistrat.launch.environment import LAUNCHERS

COLLECTIVES = {
    "all_reduce": lambda context: context.all_reduce("sum", 3.0),
    "start_all_reduce": lambda context: context.start_all_reduce("sum", 3.0).wait(),
    "all_gather": lambda context: context.all_gather(np.array([3.0]), axis=0),
    "broadcast": lambda context: context.broadcast(3.0),
    "reduce_scatter": lambda context: context.reduce_scatter("sum", np.array([3.0])),
    "all_to_all": lambda context: context.all_to_all([3.0])[0],
    "sum_of_parts": lambda context: context.sum_of_parts(np.sum, np.array([3.0]), 1),
    "barrier": lambda context: context.barrier() or 3.0,
}


@pytest.fixture
def launched(monkeypatch):
    """Return what sets the variables of a launcher, and gives the context, which has not looked at them yet."""
    for launcher in LAUNCHERS:
        monkeypatch.delenv(launcher.rank, raising=False)
    monkeypatch.delenv("MPISTRAT_STRICT", raising=False)

    def launch(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        context = mpistrat.get_replica_context()
        monkeypatch.setattr(context, "_has_checked_peers", False)
        return context

    return launch


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.mark.parametrize("method", COLLECTIVES)
def test_a_collective_outside_run_warns_once_and_returns_the_local_value(launched, method):
    context = launched(**OPEN_MPI)
    with pytest.warns(
        UserWarning, match=rf"rank 1: ReplicaContext.{method} was called outside strategy.run, in a job of 4"
    ) as seen:
        assert COLLECTIVES[method](context) == 3.0
    assert rf"correct:    strategy.run(lambda: mpistrat.get_replica_context().{method}(" in str(seen[0].message)
    assert seen[0].filename == __file__, "the line is the user's"
    for again in COLLECTIVES.values():
        assert again(context) == 3.0  # a second warning would be an error here


@pytest.mark.parametrize("method", COLLECTIVES)
def test_in_strict_mode_each_collective_outside_run_raises(launched, method):
    context = launched(**OPEN_MPI, MPISTRAT_STRICT="1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"rank 1: ReplicaContext.{method} was called outside strategy.run"):
            COLLECTIVES[method](context)
    variable = mpistrat.Variable(1.0)  # what does not communicate is as it was
    context.update(variable, lambda old: old + 1)
    assert variable.numpy() == 2
    assert context.merge_call(lambda strategy, value: value, args=(5,)) == 5


@pytest.mark.parametrize(
    "variables", [{}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, {"PMIX_RANK": "0"}, {"SLURM_PROCID": "0"}]
)
def test_a_single_process_hears_nothing(launched, variables):
    context = launched(**variables, MPISTRAT_STRICT="1")
    for collective in COLLECTIVES.values():
        assert collective(context) == 3.0


def test_a_launcher_that_does_not_count_its_ranks_has_several_where_this_is_not_the_first(launched):
    with pytest.warns(UserWarning, match="rank 2: .* in a job of several ranks"):
        launched(PMIX_RANK="2").all_reduce("sum", 3.0)


def test_one_replica_that_was_asked_for_is_silent(launched):
    launched(**OPEN_MPI)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mpistrat.OneDeviceStrategy().run(lambda: mpistrat.get_replica_context().all_reduce("sum", 3.0)) == 3


def test_mpi_is_not_started_for_the_question():
    program = (
        "import sys, warnings, mpistrat\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    mpistrat.get_replica_context().all_reduce('sum', 1.0)\n"
        "print(len(seen), 'mpi4py.MPI' in sys.modules)"
    )
    environ = {**OPEN_MPI, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "False"]


@pytest.mark.parametrize("line", ["mpistrat.PerReplica(3.0).read()", "mpistrat.Variable(3.0)", "mpistrat.Mirrored(3.0) + 1"])
def test_any_public_name_finds_the_default_strategy(line):
    program = f"import mpistrat\ntry: {line}\nexcept mpistrat.errors.InvalidArgumentError as error: print(error)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout
    assert ("a per-replica value was read" in said) == ("PerReplica" in line)
