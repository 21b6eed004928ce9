"""Parameter servers: who plays which role, and how a strategy begins and ends."""

import json
import time
from contextlib import nullcontext

import pytest

import mpistrat
from mpistrat.cluster_resolver import MPIClusterResolver, SimpleClusterResolver, TFConfigClusterResolver
from mpistrat.errors import AgreementError, CancelledError, InvalidArgumentError, LaunchError, SettingError
from mpistrat.experimental import ParameterServerStrategy
from mpistrat.experimental.coordinator import ClusterCoordinator, RemoteValueStatus
from mpistrat.launch.bootstrap import start
from tests.launches import needs_ranks
from tests.processes import until
from tests.ranks.servers import on_chief, serve, variable

pytestmark = needs_ranks(4)


def test_main_returns_what_the_program_returns_on_the_chief_alone():
    got = serve(1, lambda coordinator: type(coordinator.strategy).__name__)
    assert got == ("ParameterServerStrategy" if start().rank == 0 else None)


@on_chief()
def test_the_chief_computes_nothing(coordinator):
    strategy = coordinator.strategy
    assert ClusterCoordinator(strategy) is coordinator
    assert coordinator.strategy is strategy
    assert (strategy.num_replicas_in_sync, strategy.cluster_resolver.task_type) == (1, "chief")
    methods = "run", "reduce", "gather", "experimental_distribute_dataset", "distribute_datasets_from_function"
    for method in methods:
        with pytest.raises(NotImplementedError, match=rf"strategy.{method} was called on the chief"):
            getattr(strategy, method)(abs, 1)
    servers = tuple(f"/job:ps/task:{index}" for index in range(len(strategy.extended.server_bytes)))
    assert strategy.extended.parameter_devices == servers


def test_a_chief_that_raises_ends_the_servers():
    def program(coordinator):
        variable(coordinator, 1.0)
        coordinator.schedule(time.sleep, (0.1,))
        raise KeyError("of the chief")

    with pytest.raises(KeyError, match="of the chief") if start().rank == 0 else nullcontext():
        assert serve(2, program) is None


def test_after_closing_nothing_is_scheduled_and_what_waited_is_cancelled():
    kept = {}

    def program(coordinator):
        kept["values"] = [coordinator.schedule(time.sleep, (0.02,)) for _ in range(200)]
        kept["variable"], kept["coordinator"] = variable(coordinator, 1.0), coordinator

    serve(2, program)
    if start().rank == 0:
        assert kept["values"][0].status is RemoteValueStatus.READY
        with pytest.raises(CancelledError, match="was cancelled before it ran: the strategy was closed"):
            kept["values"][-1].fetch()
        with pytest.raises(RuntimeError, match="the strategy was closed"):
            kept["coordinator"].schedule(abs, (1,))
        with pytest.raises(RuntimeError, match="or the strategy that made the variable was closed"):
            kept["variable"].numpy()
        with pytest.raises(RuntimeError, match="or the strategy that made the variable was closed"):
            variable(kept["coordinator"], 2.0)
        kept["coordinator"].join()
        kept["coordinator"].strategy.close()


@on_chief()
def test_nothing_is_scheduled_once_workers_were_told_to_end(coordinator, tmp_path):
    value = coordinator.schedule(lambda: until((tmp_path / "let go").exists, 60.0))
    coordinator.strategy._close(patience=0.0)  # as where the program has raised, and a function goes on
    with pytest.raises(RuntimeError, match="schedule: the strategy was closed"):
        coordinator.schedule(abs, (1,))
    (tmp_path / "let go").touch()
    value.fetch()


def test_strategies_of_a_process_do_not_disturb_each_other():
    resolver = MPIClusterResolver(chief=1, ps=1)
    if resolver.task_type != "chief":
        servers = [mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id) for _ in range(2)]
        for server in servers:
            server.join()
            server.join()  # which returns at once
        return
    coordinators = [ClusterCoordinator(ParameterServerStrategy(resolver)) for _ in range(2)]
    for value, coordinator in enumerate(coordinators):
        number = variable(coordinator, value)
        assert (int(number), coordinator.schedule(lambda number=number: int(number) + 1).fetch()) == (value, value + 1)
        coordinator.strategy.close()
        assert not coordinator.strategy.client.channel.comm, "MPI keeps no communicator of it"
        with pytest.raises(RuntimeError, match="or the strategy that made the variable was closed"):
            number.numpy()


def test_the_two_part_form_and_other_resolvers(monkeypatch):
    size, rank = start().size, start().rank
    jobs = {"chief": 1, "ps": 1, "worker": size - 2}
    tasks = [(job, index) for job, count in jobs.items() for index in range(count)][::-1]
    cluster = {job: [f"a:{8000 + 10 * len(job) + index}" for index in range(count)] for job, count in jobs.items()}
    job, index = tasks[rank]
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}))
    resolver = TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        mpistrat.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
        return
    strategy = ParameterServerStrategy(resolver)
    number = variable(ClusterCoordinator(strategy), 2)
    assert ClusterCoordinator(strategy).schedule(lambda: int(number) + 1).fetch() == 3
    strategy.close()


def test_an_evaluator_stays_outside():
    resolver = MPIClusterResolver(chief=1, ps=1, evaluator=1)
    got = ParameterServerStrategy.main(lambda coordinator: coordinator.schedule(abs, (-3,)).fetch(), resolver)
    assert got == (3 if resolver.task_type == "chief" else None)
    assert (resolver.task_type == "evaluator") == (start().rank == start().size - 1)


def test_wrong_roles_are_refused_on_all_ranks():
    size, rank = start().size, start().rank
    with pytest.raises(InvalidArgumentError, match=rf"at least one worker and one ps; this cluster has {size} worker"):
        ParameterServerStrategy.main(abs, MPIClusterResolver())
    with pytest.raises(InvalidArgumentError, match="parameter servers know the jobs chief, worker, ps, evaluator"):
        ParameterServerStrategy.main(abs, MPIClusterResolver({"ps": 1, "other": size - 1}))
    with pytest.raises(LaunchError, match=f"are {size + 1} ranks, but {size} were launched"):
        MPIClusterResolver(chief=1, ps=size - 1)
    with pytest.raises(InvalidArgumentError, match="pass either jobs or chief, ps and evaluator"):
        MPIClusterResolver({"worker": size}, ps=1)
    spec = {"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3", "a:4"]}
    task = [("chief", 0), ("ps", 0), *[("worker", 0)] * (size - 2)][rank]
    resolver = SimpleClusterResolver(mpistrat.ClusterSpec(spec), task_type=task[0], task_id=task[1])
    with pytest.raises(LaunchError, match="worker 1 is played by 0 ranks"):
        ParameterServerStrategy.main(abs, resolver)


def test_settings_that_ranks_cannot_share_are_refused_on_all(monkeypatch):
    is_first = start().rank == 0
    with monkeypatch.context() as patch:
        if is_first:
            patch.setenv("MPISTRAT_TIMEOUT_SECONDS", "soon")
        with pytest.raises(SettingError if is_first else AgreementError, match="MPISTRAT_TIMEOUT_SECONDS='soon'"):
            serve(1, abs)
    monkeypatch.setenv("MPISTRAT_MAX_MESSAGE_BYTES", "20000" if is_first else "10000")
    with pytest.raises(AgreementError, match="MPISTRAT_MAX_MESSAGE_BYTES=10000"):
        serve(1, abs)
