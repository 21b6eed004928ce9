"""ClusterSpec and the roles of its tasks; cluster resolvers that need no MPI: told, read from TF_CONFIG, and joined."""

import json

import pytest

from mpistrat.cluster import ClusterSpec, check_role, is_chief
from mpistrat.cluster_resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
    chief_rank,
    gpus_of_task,
    tasks_of_ranks,
    training_role,
)
from mpistrat.errors import InvalidArgumentError, LaunchError, MpistratError
from mpistrat.topology.world import World

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}


def test_dense_jobs_are_lists_and_sparse_ones_dicts_and_unknown_ones_are_refused():
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
    spec = ClusterSpec(CLUSTER)
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks, lambda job: spec.task_address(job, 0)):
        with pytest.raises(ValueError, match="there is no job 'ps'; the jobs are chief, worker"):
            ask("ps")
    with pytest.raises(ValueError, match="job 'worker' has no task 2; its tasks are 0, 1"):
        spec.task_address("worker", 2)
    with pytest.raises(ValueError, match="there is no job 'worker'; the jobs are none"):
        ClusterSpec({}).num_tasks("worker")


def test_a_copy_is_its_own_and_truth_and_equality_are_of_the_jobs():
    given = {"worker": ["a:1", "b:1"]}
    spec = ClusterSpec(given)
    copy = ClusterSpec(spec)
    given["worker"].append("c:1")
    spec.as_dict()["worker"].append("c:1")
    assert copy == spec == ClusterSpec({"worker": ["a:1", "b:1"]})
    assert not ClusterSpec({})
    assert ClusterSpec(CLUSTER)
    assert ClusterSpec(CLUSTER) == ClusterSpec({"worker": {1: "c:1", 0: "b:1"}, "chief": ["a:1"]})
    assert ClusterSpec(CLUSTER) != ClusterSpec({"worker": ["b:1", "c:1"]})
    assert ClusterSpec(CLUSTER) != CLUSTER
    assert ClusterSpec({"worker": {"1": "b:1"}}) == ClusterSpec({"worker": {1: "b:1"}})  # the keys of JSON are texts
    with pytest.raises(TypeError, match="unhashable"):
        hash(ClusterSpec(CLUSTER))
    assert repr(ClusterSpec(CLUSTER)) == f"ClusterSpec({CLUSTER!r})"


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


def test_who_is_the_chief():
    assert [is_chief(CLUSTER, *task) for task in [("chief", 0), ("worker", 0), ("worker", 1)]] == [True, False, False]
    assert [is_chief({"worker": ["a:1", "b:1"]}, "worker", index) for index in (0, 1)] == [True, False]
    assert is_chief({"master": ["a:1"], "worker": ["b:1"]}, "master", 0)
    assert not is_chief({"master": ["a:1"], "worker": ["b:1"]}, "worker", 0)
    assert is_chief(CLUSTER, "evaluator", 0)
    assert not is_chief({"ps": ["a:1"]}, "ps", 0)


@pytest.mark.parametrize(
    ("cluster", "task", "message"),
    [
        (CLUSTER, ("boss", 0), "task type 'boss' is unknown; accepted are chief, master, worker, ps, evaluator"),
        (CLUSTER, (None, 0), "task type None is unknown; accepted are chief, master, worker, ps, evaluator"),
        (CLUSTER, ("ps", 0), "task type 'ps' is not a job of the cluster, which has chief, worker"),
        ({}, ("worker", 0), "task type 'worker' is not a job of the cluster, which has none"),
        (CLUSTER, ("worker", 2), "task id 2 is not in job 'worker', whose tasks are 0, 1"),
        (CLUSTER, ("worker", None), "task id None is not in job 'worker', whose tasks are 0, 1"),
        (CLUSTER, ("worker", -1), "task id -1 is not in job 'worker', whose tasks are 0, 1"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "a cluster has at most one chief; {} has 2"),
        ({"chief": ["a:1"], "master": ["b:1"]}, ("chief", 0), "a cluster has at most one chief; {} has 2"),
        ({"worker": ["c:1"], "evaluator": ["a:1", "b:1"]}, ("worker", 0), "a cluster has at most one evaluator; {} has 2"),
    ],
)
def test_a_task_that_the_cluster_does_not_have(cluster, task, message):
    for check in (check_role, is_chief):
        with pytest.raises(InvalidArgumentError) as caught:
            check(cluster, *task)
        assert str(caught.value) == message.format(f"ClusterSpec({cluster})")


TF_CONFIG = {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}


def simple(cluster=CLUSTER, **keywords):
    return SimpleClusterResolver(ClusterSpec(cluster), **keywords)


def test_a_simple_one_says_what_it_was_told():
    told = simple(master="m:1", task_type="worker", task_id=1, environment="lab", num_accelerators={"GPU": 2}, rpc_layer="grpc")
    assert told.cluster_spec() == ClusterSpec(CLUSTER)
    assert told.cluster_spec() is not told.cluster_spec()
    assert (told.task_type, told.task_id, told.rpc_layer, told.environment) == ("worker", 1, "grpc", "lab")
    assert told.num_accelerators() == {"GPU": 2}
    masters = [told.master(), told.master("worker", 0), told.master("worker", 0, "http")]
    assert masters == ["grpc://m:1", "grpc://b:1", "http://b:1"]
    plain = simple()
    assert (plain.task_type, plain.task_id, plain.rpc_layer, plain.environment, plain.master()) == (None, None, None, "", "")
    assert (plain.num_accelerators(), plain.master("chief", 0)) == ({}, "a:1")
    with pytest.raises(TypeError, match=r"cluster_spec must be a ClusterSpec, such as ClusterSpec\({…}\); got dict"):
        SimpleClusterResolver(CLUSTER)
    with pytest.raises(TypeError, match="master must be a string; got int"):
        simple(master=1)


def test_the_base_needs_a_cluster():
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()

    class Mine(ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec(CLUSTER)

    mine = Mine()
    assert (mine.task_type, mine.task_id, mine.rpc_layer, mine.environment) == (None, None, None, "")
    assert (mine.master(), mine.num_accelerators()) == ("", {})
    mine.task_type, mine.task_id, mine.rpc_layer = "chief", 0, "grpc"
    assert mine.master() == "grpc://a:1"


class TestTFConfig:
    @pytest.fixture(autouse=True)
    def tf_config(self, monkeypatch):
        def config(value=TF_CONFIG):
            monkeypatch.setenv("TF_CONFIG", value if isinstance(value, str) else json.dumps(value))

        config()
        return config

    def test_it_is_read_with_all_its_keys_and_the_cluster_anew(self, tf_config):
        read = TFConfigClusterResolver()
        assert read.cluster_spec() == ClusterSpec(CLUSTER)
        assert (read.task_type, read.task_id, read.rpc_layer, read.environment) == ("worker", 1, None, "")
        assert read.master() == "c:1"
        assert read.master("chief", 0, "grpc") == "grpc://a:1"
        assert read.num_accelerators() == {}
        read = TFConfigClusterResolver("chief", 0, "http", "lab")  # arguments win
        assert (read.task_type, read.task_id, read.rpc_layer, read.environment) == ("chief", 0, "http", "lab")
        assert read.master() == "http://a:1"
        read = TFConfigClusterResolver()
        tf_config({"cluster": {"worker": ["z:1"]}})
        assert read.cluster_spec() == ClusterSpec({"worker": ["z:1"]})
        assert read.master() == "", "the only task has no master"
        tf_config({**TF_CONFIG, "rpc_layer": "grpc", "environment": "cloud", "session_master": "here"})
        read = TFConfigClusterResolver()
        assert (read.rpc_layer, read.environment, read.master()) == ("grpc", "cloud", "here")

    @pytest.mark.parametrize("text", ["", " ", "{}"])
    def test_none_is_an_empty_cluster(self, tf_config, text):
        tf_config(text)
        read = TFConfigClusterResolver()
        assert not read.cluster_spec()
        assert (read.task_type, read.task_id, read.master()) == (None, None, "")

    def test_indices_that_are_texts_and_names_that_are_numbers(self, tf_config):
        tf_config({"cluster": {"worker": {"3": "a:1"}}, "task": {"type": "worker", "index": "3"}})
        read = TFConfigClusterResolver()
        assert (read.task_id, read.cluster_spec().task_indices("worker")) == (3, [3])
        tf_config({"cluster": {"1": ["a:1", "b:1"]}, "task": {"type": 1, "index": 0}, "rpc_layer": 2})
        read = TFConfigClusterResolver()
        assert (read.task_type, read.task_id, read.rpc_layer, read.master()) == ("1", 0, "2", "2://a:1")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", r"TF_CONFIG='{' is not valid JSON \(Expecting .*\); accepted is {\"cluster\": "),
            ("[1]", r"TF_CONFIG='\[1\]' is not a JSON object; accepted is"),
            ('{"task": 3}', "'task' of TF_CONFIG must be an object; got 3; accepted is"),
            ('{"task": {"index": "x"}}', "the task index must be a number; got 'x'; TF_CONFIG is as in"),
            ('{"task": {"index": 1.5}}', "the task index must be a number; got 1.5"),
            ('{"task": {"index": Infinity}}', "the task index must be a number; got inf"),
            ('{"cluster": ["a"]}', "'cluster' of TF_CONFIG must be an object; got"),
            ('{"cluster": {"worker": "a:1"}}', "'cluster' of TF_CONFIG: .*; accepted is"),
        ],
    )
    def test_what_cannot_be_read(self, tf_config, text, message):
        tf_config(text)
        with pytest.raises(InvalidArgumentError, match=message):
            TFConfigClusterResolver().cluster_spec()


class TestUnion:
    def test_lists_are_put_one_after_the_other_and_dicts_are_merged(self):
        union = UnionResolver(simple({"worker": ["a:1"], "ps": ["p:1"]}), simple({"worker": ["b:1", "c:1"], "chief": ["d:1"]}))
        assert union.cluster_spec().as_dict() == {"worker": ["a:1", "b:1", "c:1"], "ps": ["p:1"], "chief": ["d:1"]}
        union = UnionResolver(simple({"worker": ["a:1"]}), simple({"worker": {3: "d:1"}}), simple({"worker": {1: "b:1"}}))
        assert union.cluster_spec().as_dict() == {"worker": {0: "a:1", 1: "b:1", 3: "d:1"}}
        union = UnionResolver(simple({"worker": ["a:1", "b:1"]}), simple({"worker": {1: "c:1", 5: "d:1"}}))
        with pytest.raises(KeyError, match="task 1 of job 'worker' is both b:1 and c:1"):
            union.cluster_spec()
        with pytest.raises(ValueError, match="UnionResolver needs at least one ClusterResolver; got none"):
            UnionResolver()
        with pytest.raises(TypeError, match="UnionResolver joins ClusterResolvers; got dict"):
            UnionResolver(simple(), {})

    def test_all_else_is_as_keywords_and_the_first_say(self):
        said = {"master": "m:1", "environment": "lab", "num_accelerators": {"GPU": 1}, "rpc_layer": "grpc"}
        first = simple(task_type="chief", task_id=0, **said)
        union = UnionResolver(first, simple({"ps": ["p:1"]}, task_type="ps", task_id=0, environment="other"))
        assert (union.task_type, union.task_id, union.rpc_layer, union.environment) == ("chief", 0, "grpc", "lab")
        assert (union.master(), union.num_accelerators()) == ("grpc://m:1", {"GPU": 1})
        assert union.master("ps", 0) == "grpc://p:1", "any task of the union has an address"
        union = UnionResolver(simple(task_type="chief", task_id=0), rpc_layer="http", task_type="worker", task_id=1)
        assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 1, "http")


WORLD = World.from_node_of_rank([1, 0, 1, 0], ["z", "a", "z", "a"])


def test_ranks_are_tasks_in_the_order_of_ranks():
    spec, tasks = tasks_of_ranks(WORLD, {"chief": 1, "worker": 3}, 5000)
    assert tasks == [("chief", 0), ("worker", 0), ("worker", 1), ("worker", 2)]
    assert spec.as_dict() == {"chief": ["z:5000"], "worker": ["a:5000", "z:5001", "a:5001"]}
    assert tasks_of_ranks(WORLD, None, 8888)[1] == [("worker", rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("jobs", "port_base", "error", "message"),
    [
        ({"worker": 3}, 1, LaunchError, r"jobs asks for 3 tasks \(3 of worker\), but 4 were launched"),
        ({"chief": 1, "worker": 4}, 1, LaunchError, r"jobs asks for 5 tasks \(1 of chief, 4 of worker\), but 4 were"),
        ({"worker": -1}, 1, InvalidArgumentError, "jobs gives -1 tasks to 'worker'; a number of tasks is 0 or greater"),
        ({"worker": "4"}, 1, InvalidArgumentError, "jobs gives '4' tasks to 'worker'"),
        (None, 65535, InvalidArgumentError, "port_base must be the first of 2 ports, 1 to 65534; got 65535"),
        (None, "8888", InvalidArgumentError, "port_base must be the first of 2 ports"),
    ],
)
def test_jobs_that_ranks_cannot_be(jobs, port_base, error, message):
    with pytest.raises(error, match=message):
        tasks_of_ranks(WORLD, jobs, port_base)


@pytest.mark.parametrize(
    ("variables", "arguments", "gpus"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, (None, None), 2),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "1"}, (None, None), 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (None, None), 2),
        *(({"CUDA_VISIBLE_DEVICES": none}, (None, None), 0) for none in ("", "-1", "NoDevFiles")),
        ({}, (8, 3), 3),
        ({}, (2, 2), "2 tasks on a node with 2 GPUs each need 4, but the node has 2; ask SLURM for more"),
        ({"SLURM_GPUS_ON_NODE": "1"}, (None, 1), "2 tasks on a node with 1 GPUs each need 2, but the node has 1"),
        ({}, (None, 1), "but the node has 0"),
        ({}, (None, -1), "gpus_per_task must be 0 or a positive number; got -1"),
        ({}, ("two", None), "gpus_per_node must be 0 or a positive number; got 'two'"),
    ],
)
def test_gpus_of_two_tasks_on_a_node_of_slurm(monkeypatch, variables, arguments, gpus):
    for name in ("SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(gpus, int):
        assert gpus_of_task(2, *arguments) == gpus
    else:
        with pytest.raises(MpistratError, match=gpus):
            gpus_of_task(2, *arguments)


def chief(cluster, *tasks):
    return chief_rank(ClusterSpec(cluster), tasks)


def test_the_chief_is_the_lowest_rank_of_that_task_and_each_task_has_one():
    assert chief({}, *[(None, None)] * 3) == 0
    assert chief(CLUSTER, ("worker", 0), ("worker", 1), ("chief", 0)) == 2
    workers = {"worker": ["a:1", "b:1"]}
    assert chief(workers, ("worker", 1), ("worker", 1), ("worker", 0), ("worker", 0)) == 2
    # nobody is the chief where worker 0 is missing
    assert chief({"worker": {1: "a:1", 2: "b:1"}}, ("worker", 2), ("worker", 1)) == 0
    with pytest.raises(LaunchError) as caught:
        chief(CLUSTER, ("worker", 0))
    assert str(caught.value) == (
        "the cluster has 3 tasks that train, but this job of 1 ranks has only worker 0; no rank is chief 0, worker 1. The "
        "ranks come from MPI: start all tasks as one job, with mpistrat run, mpiexec or srun, or leave out of the cluster "
        "(TF_CONFIG, or the resolver's) the tasks that are not started"
    )
    assert caught.value.raised_everywhere


@pytest.mark.parametrize(
    ("cluster", "task", "message"),
    [
        (CLUSTER, (None, None), "gives a cluster with the jobs chief, worker, but not which task of it this process is"),
        (CLUSTER, ("worker", None), "task_type is 'worker' and task_id None; both are needed, as in task_type='worker', "),
        (CLUSTER, ("worker", 2), "task id 2 is not in job 'worker', whose tasks are 0, 1"),
        ({"ps": ["a:1"], "worker": ["b:1"]}, ("ps", 0), "process is ps 0 of a cluster with the jobs ps, worker: only chief"),
        (CLUSTER, ("evaluator", 0), "only chief and workers train together; start an evaluator as a job of its own"),
        ({**CLUSTER, "evaluator": ["e:1"]}, ("chief", 0), "a cluster with the jobs chief, worker, evaluator: only chief and"),
    ],
)
def test_tasks_that_do_not_train(cluster, task, message):
    with pytest.raises(InvalidArgumentError, match=message):
        training_role(simple(cluster, task_type=task[0], task_id=task[1]))


def test_the_role_of_a_training():
    assert training_role(simple(task_type="worker", task_id=1)) == (ClusterSpec(CLUSTER), ("worker", 1))
    assert training_role(simple({})) == (ClusterSpec({}), (None, None))
    with_ps = {"ps": ["a:1"], "worker": ["b:1"]}
    assert training_role(simple(with_ps, task_type="worker", task_id=0))[1] == ("worker", 0)
