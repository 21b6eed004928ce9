"""Parameter servers: what is scheduled on workers, and what a strategy of servers does."""

import gc
import itertools
import json
import os
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest

import mpistrat
from mpistrat.cluster_resolver import MPIClusterResolver, SimpleClusterResolver, TFConfigClusterResolver
from mpistrat.errors import AgreementError, CancelledError, InvalidArgumentError, LaunchError, OutOfRangeError, SettingError
from mpistrat.experimental import ParameterServerStrategy
from mpistrat.experimental.coordinator import ClusterCoordinator, PerWorkerValues, RemoteValueStatus
from mpistrat.launch.bootstrap import start
from tests.launches import needs_ranks, up_to_ranks
from tests.processes import until
from tests.ranks.servers import on_chief, serve, variable

pytestmark = needs_ranks(4)
with_workers = on_chief(num_servers=[1])  # two, or more


@with_workers
def test_functions_get_arguments_and_return_results(coordinator):
    def scaled(numbers, by=1, *, also=0):
        return {"scaled": numbers * by, "pid": os.getpid(), "also": also}

    values = [coordinator.schedule(scaled, (np.arange(turn),), {"by": turn, "also": "x"}) for turn in range(20)]
    found = coordinator.fetch({"all": values})["all"]
    for turn, one in enumerate(found):
        np.testing.assert_array_equal(one["scaled"], turn * np.arange(turn))
    assert os.getpid() not in {one["pid"] for one in found}
    assert values[3].status is RemoteValueStatus.READY
    assert values[3].get()["also"] == "x"
    assert coordinator.schedule(sum, ([1, 2, values[2].fetch()["also"] == "x"],)).fetch() == 4
    assert coordinator.schedule(lambda number: number + 1, (coordinator.schedule(lambda: 20),)).fetch() == 21
    large = np.arange(3_000_000.0)
    assert coordinator.schedule(np.sum, (large,)).fetch() == large.sum()
    np.testing.assert_array_equal(coordinator.schedule(lambda: np.arange(3_000_000.0)).fetch(), large)
    assert coordinator.done()


@up_to_ranks(8)
@with_workers
def test_all_workers_work(coordinator):
    workers = len(coordinator.strategy.extended.worker_devices)

    def step():
        time.sleep(0.01)
        return os.getpid()

    assert len(set(coordinator.fetch([coordinator.schedule(step) for _ in range(8 * workers)]))) == workers


@with_workers
def test_schedule_does_not_wait_and_thousands_go_on_while_the_chief_computes(coordinator):
    began = time.monotonic()
    coordinator.schedule(time.sleep, (0.5,))
    assert time.monotonic() - began < 0.4
    assert not coordinator.done()
    count = variable(coordinator, 0)
    for _ in range(3000):
        coordinator.schedule(lambda: count.assign_add(1, read_value=False))
    coordinator.join()
    assert int(count) == 3000
    values = [coordinator.schedule(lambda: None) for _ in range(200)]
    assert until(lambda: all(value.status is RemoteValueStatus.READY for value in values), 20), "nobody has waited for them"


@up_to_ranks(8)
@with_workers
def test_no_function_waits_behind_a_long_one_while_a_worker_is_free(coordinator):
    have_run = variable(coordinator, False)

    long = coordinator.schedule(lambda: until(have_run.numpy, 20))
    short = [coordinator.schedule(abs, (-1,)) for _ in range(7)]
    assert [one.fetch() for one in short] == [1] * 7
    have_run.assign(True)
    assert long.fetch(), "short functions have waited for a long one"


@with_workers
def test_the_first_error_is_raised_once_and_the_rest_is_cancelled(coordinator):
    are_scheduled = variable(coordinator, False)

    def fail_at_3(number):
        if number == 3:
            until(are_scheduled.numpy, 20)
            raise ValueError("three")
        time.sleep(0.02)
        return number

    for collect in (coordinator.join, coordinator.done, lambda: coordinator.fetch([]), lambda: coordinator.schedule(max)):
        are_scheduled.assign(False)
        values = [coordinator.schedule(fail_at_3, (number,)) for number in range(3, 80)]
        are_scheduled.assign(True)
        coordinator.strategy.dispatcher.wait_for(values[0])
        with pytest.raises(ValueError, match="three") as caught:
            collect()
        assert "in fail_at_3" in str(caught.value.__cause__)
        assert values[0].status is RemoteValueStatus.ABORTED
        with pytest.raises(ValueError, match="three"):
            values[0].fetch()
        assert values[-1].status is RemoteValueStatus.ABORTED
        with pytest.raises(CancelledError, match="was cancelled before it ran: another one had failed"):
            values[-1].fetch()
        coordinator.join()
        assert coordinator.done()
        assert coordinator.fetch(coordinator.schedule(fail_at_3, (4,))) == 4


@with_workers
def test_what_cannot_be_sent_is_refused(coordinator):
    lock = threading.Lock()

    with pytest.raises(TypeError, match="function .*<lambda> cannot be sent to another rank"):
        coordinator.schedule(lambda: lock)
    with pytest.raises(TypeError, match="an argument of function .* cannot be sent to another rank"):
        coordinator.schedule(print, (lock,))
    with pytest.raises(TypeError, match="got 3"):
        coordinator.schedule(3)
    for not_a_list in ("ab", {"x": 1}, np.ones(1)):  # each of whose elements would be an argument
        with pytest.raises(InvalidArgumentError, match="args must be a list or tuple"):
            coordinator.schedule(print, args=not_a_list)
    value = coordinator.schedule(threading.Lock)
    with pytest.raises(TypeError, match="the result of function .* cannot be sent to another rank"):
        coordinator.join()
    assert value.status is RemoteValueStatus.ABORTED
    assert coordinator.schedule(abs, (-1,)).fetch() == 1


@up_to_ranks(8)
@with_workers
def test_each_element_of_a_dataset_is_visited_once(coordinator):
    def elements(context):
        return range(context.input_pipeline_id, 60, context.num_input_pipelines)

    dataset = coordinator.create_per_worker_dataset(elements)
    for _ in range(2):
        iterator = iter(dataset)
        numbers = []
        for _ in range(1000):  # where ranks outnumber cores some workers come late to their elements
            seen = [coordinator.schedule(next, (iterator, None)) for _ in range(50)]
            numbers += [number for number in coordinator.fetch(seen) if number is not None]
            if len(numbers) >= 60:
                break
        assert sorted(numbers) == list(range(60))
        ended = coordinator.schedule(lambda iterator: [next(iterator) for _ in range(61)], (iterator,))
        with pytest.raises(OutOfRangeError, match="the dataset of the worker has ended"):
            coordinator.join()
        with pytest.raises(OutOfRangeError, match="the dataset of the worker has ended"):
            coordinator.fetch([ended])
    with pytest.raises(NotImplementedError, match="are on the workers"):
        next(iterator)


@with_workers
def test_per_worker_datasets_of_datasets(coordinator):
    whole = mpistrat.ArrayDataset(np.arange(10.0), 5)
    iterator = iter(coordinator.create_per_worker_dataset(whole))
    np.testing.assert_array_equal(coordinator.schedule(next, (iterator,)).fetch(), np.arange(5))

    def made():
        return mpistrat.get_strategy().distribute_datasets_from_function(lambda context: whole)

    iterator = iter(coordinator.create_per_worker_dataset(made))
    np.testing.assert_array_equal(coordinator.schedule(lambda it: next(it), (iterator,)).fetch(), np.arange(5))
    with pytest.raises(TypeError, match="is made of a dataset"):
        coordinator.create_per_worker_dataset(3)


@with_workers
def test_a_dataset_that_cannot_be_made_fails_the_functions_that_use_it_and_no_others(coordinator):
    number = coordinator.schedule(lambda: time.sleep(0.1) or 1)
    dataset = coordinator.create_per_worker_dataset(lambda: 1 // 0)
    iterator = iter(dataset)
    coordinator.join()
    assert number.fetch() == 1
    for argument in (dataset, iterator):
        coordinator.schedule(next, (argument,))
        with pytest.raises(ZeroDivisionError):
            coordinator.join()
    assert coordinator.schedule(abs, (-1,)).fetch() == 1


@with_workers
def test_a_dropped_iterator_stays_until_the_functions_that_use_it_have_run(coordinator):
    values = []
    for _ in range(3):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: itertools.count()))
        values += [coordinator.schedule(lambda own: time.sleep(0.005) or next(own[0]), ([iterator],)) for _ in range(20)]
        del iterator
        gc.collect()
    assert len(coordinator.fetch(values)) == 60


@pytest.mark.parametrize("is_captured", [False, True])
@with_workers
def test_per_worker_values_are_those_of_the_worker_that_runs(coordinator, is_captured):
    workers = len(coordinator.strategy.extended.worker_devices)
    own, args = PerWorkerValues(range(workers)), ()
    data = iter(coordinator.create_per_worker_dataset(lambda context: itertools.repeat(context.input_pipeline_id)))
    if not is_captured:
        own, data, args = None, None, (own, data)

    def step(number=own, numbers=data):
        return os.getpid(), number, next(numbers)

    seen = {coordinator.schedule(step, args).fetch() for _ in range(10 * workers)}
    assert len(seen) == len({number for _, number, _ in seen})
    assert all(number == from_data for _, number, from_data in seen)


@with_workers
def test_scheduled_functions_run_in_the_scope_and_may_use_the_strategy(coordinator):
    strategy, total = coordinator.strategy, variable(coordinator, 0.0)

    def replica(batch):
        assert strategy.num_replicas_in_sync == 1
        total.assign_add(mpistrat.get_replica_context().all_reduce("sum", batch.sum()), read_value=False)
        return batch.max()

    def step(batch):
        assert mpistrat.get_strategy() is strategy
        assert mpistrat.in_cross_replica_context()
        assert not strategy.is_chief
        return strategy.reduce("sum", strategy.run(replica, args=(batch,)), axis=None)

    assert coordinator.schedule(step, (np.arange(4.0),)).fetch() == 3
    assert float(total) == 6


def test_main_returns_what_the_program_returns_on_the_chief_which_ends_the_servers_where_it_raises():
    got = serve(1, lambda coordinator: type(coordinator.strategy).__name__)
    assert got == ("ParameterServerStrategy" if start().rank == 0 else None)

    def program(coordinator):
        variable(coordinator, 1.0)
        coordinator.schedule(time.sleep, (0.1,))
        raise KeyError("of the chief")

    with pytest.raises(KeyError, match="of the chief") if start().rank == 0 else nullcontext():
        assert serve(2, program) is None
    resolver = MPIClusterResolver(chief=1, ps=1, evaluator=1)
    got = ParameterServerStrategy.main(lambda coordinator: coordinator.schedule(abs, (-3,)).fetch(), resolver)
    assert got == (3 if resolver.task_type == "chief" else None)
    assert (resolver.task_type == "evaluator") == (start().rank == start().size - 1)


@on_chief()
def test_the_chief_computes_nothing(coordinator):
    strategy = coordinator.strategy
    assert ClusterCoordinator(strategy) is coordinator
    assert coordinator.strategy is strategy
    assert (strategy.num_replicas_in_sync, strategy.cluster_resolver.task_type, strategy.is_chief) == (1, "chief", True)
    methods = "run", "reduce", "gather", "experimental_distribute_dataset", "distribute_datasets_from_function"
    for method in methods:
        with pytest.raises(NotImplementedError, match=rf"strategy.{method} was called on the chief"):
            getattr(strategy, method)(abs, 1)
    servers = tuple(f"/job:ps/task:{index}" for index in range(len(strategy.extended.server_bytes)))
    assert strategy.extended.parameter_devices == servers


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
