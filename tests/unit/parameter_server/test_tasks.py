"""Which clusters can train with parameter servers; what a Server and the strategy refuse before anybody meets."""

import pytest

import mpistrat
from mpistrat.cluster import ClusterSpec
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.parameter_server import tasks
from mpistrat.parameter_server.tasks import check_tasks

GOOD = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"]}


@pytest.mark.parametrize("cluster", [GOOD, {**GOOD, "evaluator": ["d:1"]}])
def test_it_may_be(cluster):
    check_tasks(ClusterSpec(cluster))


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


def test_a_task_that_is_not_known_is_refused():
    with pytest.raises(InvalidArgumentError, match="job_name is needed, for the cluster has the jobs chief, worker, ps"):
        server(GOOD)
    with pytest.raises(InvalidArgumentError, match="task_index is needed, for job 'worker' has the tasks 0, 1"):
        server(GOOD, "worker")
    with pytest.raises(InvalidArgumentError, match="the chief is not a server"):
        server(GOOD, "chief")
    with pytest.raises(TypeError, match="server_or_cluster_def must be a ClusterSpec"):
        server("a:1")


def strategy(*arguments, **named):
    return mpistrat.experimental.ParameterServerStrategy(*arguments, **named)


def test_the_strategy_refuses_what_it_cannot_take():
    resolver = mpistrat.cluster_resolver.SimpleClusterResolver(ClusterSpec(GOOD), task_type="chief", task_id=0)
    with pytest.raises(InvalidArgumentError, match="cluster_resolver must be a ClusterResolver"):
        strategy(GOOD)
    with pytest.raises(InvalidArgumentError, match="variable_partitioner must be a partitioner or None; got 2"):
        strategy(resolver, 2)
    with pytest.raises(InvalidArgumentError, match="placement must be one of even_bytes, round_robin; got 'even'"):
        strategy(resolver, placement="even")
    resolver.task_type = "worker"
    with pytest.raises(InvalidArgumentError, match="the chief makes the strategy, but this rank is worker 0"):
        strategy(resolver)
    with pytest.raises(InvalidArgumentError, match="works with a mpistrat.experimental.ParameterServerStrategy; got"):
        mpistrat.experimental.coordinator.ClusterCoordinator(mpistrat.OneDeviceStrategy())
