"""ClusterSpec, and the roles that its tasks play."""

import pytest

from mpistrat.cluster import ClusterSpec, check_role, is_chief
from mpistrat.errors import InvalidArgumentError

DENSE = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}


def test_dense_jobs_are_lists_and_sparse_ones_dicts():
    spec = ClusterSpec({"worker": {2: "c:1", 0: "a:1"}, "ps": {0: "d:1", 1: "e:1"}, "chief": ("f:1",)})
    assert spec.as_dict() == {"worker": {0: "a:1", 2: "c:1"}, "ps": ["d:1", "e:1"], "chief": ["f:1"]}
    assert spec.jobs == ["worker", "ps", "chief"]
    assert (spec.num_tasks("worker"), spec.num_tasks("ps")) == (2, 2)
    assert spec.task_indices("worker") == [0, 2]
    assert spec.job_tasks("worker") == ["a:1", None, "c:1"]
    assert spec.job_tasks("ps") == ["d:1", "e:1"]
    assert spec.task_address("worker", 2) == "c:1"
    empty = ClusterSpec({"worker": []})
    assert (empty.num_tasks("worker"), empty.task_indices("worker"), empty.job_tasks("worker")) == (0, [], [])
    assert empty.as_dict() == {"worker": []}


def test_a_copy_is_its_own():
    given = {"worker": ["a:1", "b:1"]}
    spec = ClusterSpec(given)
    copy = ClusterSpec(spec)
    given["worker"].append("c:1")
    spec.as_dict()["worker"].append("c:1")
    assert copy == spec == ClusterSpec({"worker": ["a:1", "b:1"]})


def test_truth_and_equality():
    assert not ClusterSpec({})
    assert ClusterSpec(DENSE)
    assert ClusterSpec(DENSE) == ClusterSpec({"worker": {1: "c:1", 0: "b:1"}, "chief": ["a:1"]})
    assert ClusterSpec(DENSE) != ClusterSpec({"worker": ["b:1", "c:1"]})
    assert ClusterSpec(DENSE) != DENSE
    assert ClusterSpec({"worker": {"1": "b:1"}}) == ClusterSpec({"worker": {1: "b:1"}})  # the keys of JSON are texts
    with pytest.raises(TypeError, match="unhashable"):
        hash(ClusterSpec(DENSE))
    assert repr(ClusterSpec(DENSE)) == f"ClusterSpec({DENSE!r})"


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (["a:1"], "cluster must be a dict from job name to addresses, or a ClusterSpec; got list"),
        (None, "cluster must be a dict from job name to addresses, or a ClusterSpec; got NoneType"),
        ({1: ["a:1"]}, "the name of a job must be a string; got 1"),
        (
            {"worker": "a:1"},
            "the tasks of job 'worker' must be a list of addresses, or a dict from index to address; got 'a:1'",
        ),
        ({"worker": [7]}, "the address of task 0 of job 'worker' must be a string such as 'host:8888'; got 7"),
        ({"worker": {3: None}}, "the address of task 3 of job 'worker' must be a string such as 'host:8888'; got None"),
        ({"worker": {"x": "a:1"}}, "a task index of job 'worker' must be an integer; got 'x'"),
        ({"worker": {1.0: "a:1"}}, "a task index of job 'worker' must be an integer; got 1.0"),
    ],
)
def test_a_cluster_of_wrong_types(cluster, message):
    with pytest.raises(TypeError) as caught:
        ClusterSpec(cluster)
    assert str(caught.value) == message
    with pytest.raises(InvalidArgumentError, match="a task index of job 'worker' must be 0 or greater; got -1"):
        ClusterSpec({"worker": {-1: "a:1"}})


def test_an_unknown_job_or_task_is_refused():
    spec = ClusterSpec(DENSE)
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks, lambda job: spec.task_address(job, 0)):
        with pytest.raises(ValueError, match="there is no job 'ps'; the jobs are chief, worker"):
            ask("ps")
    with pytest.raises(ValueError, match="job 'worker' has no task 2; its tasks are 0, 1"):
        spec.task_address("worker", 2)
    with pytest.raises(ValueError, match="there is no job 'worker'; the jobs are none"):
        ClusterSpec({}).num_tasks("worker")


def test_who_is_the_chief():
    assert [is_chief(DENSE, *task) for task in [("chief", 0), ("worker", 0), ("worker", 1)]] == [True, False, False]
    assert [is_chief({"worker": ["a:1", "b:1"]}, "worker", index) for index in (0, 1)] == [True, False]
    assert is_chief({"master": ["a:1"], "worker": ["b:1"]}, "master", 0)
    assert not is_chief({"master": ["a:1"], "worker": ["b:1"]}, "worker", 0)
    assert is_chief(DENSE, "evaluator", 0)
    assert not is_chief({"ps": ["a:1"]}, "ps", 0)


@pytest.mark.parametrize(
    ("cluster", "task", "message"),
    [
        (DENSE, ("boss", 0), "task type 'boss' is unknown; accepted are chief, master, worker, ps, evaluator"),
        (DENSE, (None, 0), "task type None is unknown; accepted are chief, master, worker, ps, evaluator"),
        (DENSE, ("ps", 0), "task type 'ps' is not a job of the cluster, which has chief, worker"),
        ({}, ("worker", 0), "task type 'worker' is not a job of the cluster, which has none"),
        (DENSE, ("worker", 2), "task id 2 is not in job 'worker', whose tasks are 0, 1"),
        (DENSE, ("worker", None), "task id None is not in job 'worker', whose tasks are 0, 1"),
        (DENSE, ("worker", -1), "task id -1 is not in job 'worker', whose tasks are 0, 1"),
        (
            {"chief": ["a:1", "b:1"]},
            ("chief", 0),
            "a cluster has at most one chief; ClusterSpec({'chief': ['a:1', 'b:1']}) has 2",
        ),
        (
            {"chief": ["a:1"], "master": ["b:1"]},
            ("chief", 0),
            "a cluster has at most one chief; ClusterSpec({'chief': ['a:1'], 'master': ['b:1']}) has 2",
        ),
        (
            {"worker": ["c:1"], "evaluator": ["a:1", "b:1"]},
            ("worker", 0),
            "a cluster has at most one evaluator; ClusterSpec({'worker': ['c:1'], 'evaluator': ['a:1', 'b:1']}) has 2",
        ),
    ],
)
def test_a_task_that_the_cluster_does_not_have(cluster, task, message):
    for check in (check_role, is_chief):
        with pytest.raises(InvalidArgumentError) as caught:
            check(cluster, *task)
        assert str(caught.value) == message
