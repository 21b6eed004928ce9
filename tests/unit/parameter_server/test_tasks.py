"""Which clusters can train with parameter servers; what a Server and the strategy refuse before anybody meets."""

import pytest

import mpistrat
from mpistrat.cluster import ClusterSpec
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.parameter_server import tasks
from mpistrat.parameter_server.coordinator import ClusterCoordinator
from mpistrat.parameter_server.tasks import check_tasks

GOOD = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"]}


@pytest.mark.parametrize(
    ("cluster", "found"),
    [
        ({}, "no tasks"),
        ({"worker": ["a:1"]}, "1 worker"),
        ({**GOOD, "ps": []}, "0 ps"),
        ({**GOOD, "worker": []}, "0 worker"),
        ({**GOOD, "chief": ["a:1", "a:2"]}, "2 chief"),
        ({**GOOD, "master": ["a:2"]}, "1 master"),
    ],
)
def test_it_may_not_be(cluster, found):
    with pytest.raises(InvalidArgumentError, match=f"this cluster has .*{found}"):
        check_tasks(ClusterSpec(cluster))


def server(*arguments, **named):
    return mpistrat.Server(*arguments, start=False, **named)


def test_without_cloudpickle_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(tasks, "find_spec", {}.get)
    with pytest.raises(LaunchError, match=r"cloudpickle, which is not installed: pip install '\.\[parameter-server\]'"):
        check_tasks(ClusterSpec(GOOD))


def test_a_server_knows_its_task():
    made = server(GOOD, "worker", 1)
    assert made.server_def == {"cluster": GOOD, "job_name": "worker", "task_index": 1, "protocol": "mpi"}
    assert made.target == "mpi://b:2"
    assert server(made.server_def).server_def == made.server_def
    assert server(made.server_def, task_index=0).target == "mpi://b:1"
    assert server({"ps": ["c:1"]}).server_def["job_name"] == "ps", "the only task"
    assert server(ClusterSpec(GOOD), "ps", protocol="grpc").target == "grpc://c:1"
    with pytest.raises(RuntimeError, match=r"call start\(\) on all ranks before join\(\)"):
        made.join()


def strategy(resolver, *arguments, **named):
    return mpistrat.experimental.ParameterServerStrategy(resolver, *arguments, **named)


def task(task_type):
    return mpistrat.cluster_resolver.SimpleClusterResolver(ClusterSpec(GOOD), task_type=task_type, task_id=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: server(GOOD), "job_name is needed, for the cluster has the jobs chief, worker, ps"),
        (lambda: server(GOOD, "worker"), "task_index is needed, for job 'worker' has the tasks 0, 1"),
        (lambda: server(GOOD, "chief"), "the chief is not a server"),
        (lambda: server("a:1"), "server_or_cluster_def must be a ClusterSpec"),
        (lambda: strategy(GOOD), "cluster_resolver must be a ClusterResolver"),
        (lambda: strategy(task("chief"), 2), "variable_partitioner must be a partitioner or None; got 2"),
        (lambda: strategy(task("chief"), placement="even"), "placement must be one of even_bytes, round_robin; got 'even'"),
        (lambda: strategy(task("worker")), "the chief makes the strategy, but this rank is worker 0"),
        (lambda: ClusterCoordinator(mpistrat.OneDeviceStrategy()), "works with a mpistrat.exp.*.ParameterServerStrategy; got"),
    ],
)
def test_what_a_server_a_strategy_or_a_coordinator_cannot_take_is_refused(make, message):
    with pytest.raises(TypeError if "ClusterSpec" in message else InvalidArgumentError, match=message):
        make()
