"""The replica context outside all scopes: alone it is quiet; in a job of several ranks it says that it combines nothing."""

import warnings

import pytest

import mpistrat
from mpistrat.launch.environment import LAUNCHERS
from tests.processes import python
from tests.unit import replicas
from tests.unit.replicas import IN_REPLICA


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


@pytest.mark.parametrize("method", IN_REPLICA)
def test_a_collective_outside_run_warns_once_and_returns_the_local_value(launched, method):
    context = launched(**OPEN_MPI)
    with pytest.warns(
        UserWarning, match=rf"rank 1: ReplicaContext.{method} was called outside strategy.run, in a job of 4"
    ) as seen:
        assert IN_REPLICA[method](context) == 3.0
    assert rf"correct:    strategy.run(lambda: mpistrat.get_replica_context().{method}(" in str(seen[0].message)
    assert seen[0].filename == replicas.__file__, "the line is the user's, who makes the call there"
    for again in IN_REPLICA.values():
        assert again(context) == 3.0  # a second warning would be an error here


@pytest.mark.parametrize("method", IN_REPLICA)
def test_in_strict_mode_each_collective_outside_run_raises(launched, method):
    context = launched(**OPEN_MPI, MPISTRAT_STRICT="1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"rank 1: ReplicaContext.{method} was called outside strategy.run"):
            IN_REPLICA[method](context)
    variable = mpistrat.Variable(1.0)  # what does not communicate is as it was
    context.update(variable, lambda old: old + 1)
    assert variable.numpy() == 2
    assert context.merge_call(lambda strategy, value: value, args=(5,)) == 5


@pytest.mark.parametrize(
    "variables", [{}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, {"PMIX_RANK": "0"}, {"SLURM_PROCID": "0"}]
)
def test_a_single_process_hears_nothing(launched, variables):
    context = launched(**variables, MPISTRAT_STRICT="1")
    for collective in IN_REPLICA.values():
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
    assert python(program, **OPEN_MPI, MPISTRAT_STRICT="0").stdout.split() == ["1", "False"]


@pytest.mark.parametrize("line", ["mpistrat.PerReplica(3.0).read()", "mpistrat.Variable(3.0)", "mpistrat.Mirrored(3.0) + 1"])
def test_any_public_name_finds_the_default_strategy(line):
    program = f"import mpistrat\ntry: {line}\nexcept mpistrat.errors.InvalidArgumentError as error: print(error)"
    done = python(program)
    assert (done.returncode, "a per-replica value was read" in done.stdout) == (0, "PerReplica" in line)
