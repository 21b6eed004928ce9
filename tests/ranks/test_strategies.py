"""The strategies one by one: devices, options, resolvers and roles, and what each refuses, on every rank."""

import json
import re
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat
from mpistrat.cluster_resolver import (
    ClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.cross_device import HierarchicalAllReduce, ReductionToOneDevice
from mpistrat.errors import AgreementError, DeadlineExceededError, InvalidArgumentError, LaunchError
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.strategy.mirrored import CentralStorageStrategy, ExperimentalMultiWorkerMirroredStrategy
from mpistrat.topology.world import device_name
from tests.launches import needs_ranks, on_ranks
from tests.ranks.cases import case
from tests.variable_matrix import made

pytestmark = on_ranks(1, 3)

CPU = "/job:worker/replica:0/task:{}/device:CPU:0"


@pytest.fixture
def together(comm):
    """Check, after a test in which every rank raised, that none is left behind."""
    yield
    assert comm.allreduce(1) == comm.size


def all_reduced(strategy, value):
    """Return the sum over the replicas, as each of them has it."""
    total = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", value))
    return strategy.experimental_local_results(total)[0]


def refused(error, message, make):
    """Check that making a strategy raises an error with a message."""
    with pytest.raises(error, match=re.escape(message)) as caught:
        make()
    return caught.value


def worker(index, *addresses):
    """Return a resolver that says which of some workers this rank is."""
    return SimpleClusterResolver(mpistrat.ClusterSpec({"worker": list(addresses)}), task_type="worker", task_id=index)


class Moody(ClusterResolver):
    def __init__(self, fails):
        self.fails = fails

    def cluster_spec(self):
        if self.fails:
            raise OSError("no cloud today")
        return mpistrat.ClusterSpec({})


MIRRORED, MULTI = mpistrat.MirroredStrategy, mpistrat.MultiWorkerMirroredStrategy
NO_GPU = "device '/gpu:0' does not exist: ranks compute on CPUs here; accepted are /cpu:0 (each rank's own) and rank:0"
NOT_EACH = " must name each rank of this node once, in order. This node has "
NO_OPS = "cross_device_ops must be a CrossDeviceOps, such as mpistrat.ReductionToOneDevice(); got "
NO_RESOLVER = (
    "cluster_resolver must be a ClusterResolver or None; got {}.\n"
    "    incorrect:  mpistrat.MultiWorkerMirroredStrategy(options)\n"
    "    correct:    mpistrat.MultiWorkerMirroredStrategy(communication_options=options)"
)
REFUSED = [
    (lambda: MIRRORED(["/gpu:0"]), InvalidArgumentError, NO_GPU),
    (lambda: MIRRORED(["rank:99"]), InvalidArgumentError, "device 'rank:99' does not exist: there is no rank 99; accepted are"),
    (lambda: MIRRORED(["tpu:0"]), InvalidArgumentError, "'tpu:0' is not a device name; accepted are /cpu:0"),
    (lambda: MIRRORED(["rank:0", "rank:0"]), InvalidArgumentError, f"devices=['rank:0', 'rank:0']{NOT_EACH}"),
    (lambda: MIRRORED([]), InvalidArgumentError, f"devices=[]{NOT_EACH}"),
    (lambda: MIRRORED("/cpu:0"), TypeError, "devices must be None or a list of device names, ['"),
    (lambda: MIRRORED({"rank:0"}), TypeError, "devices must be None or a list of device names, ['"),
    (lambda: MIRRORED(cross_device_ops="nccl"), TypeError, f"{NO_OPS}'nccl'"),
    (lambda: MIRRORED(cross_device_ops=ReductionToOneDevice), TypeError, f"{NO_OPS}{ReductionToOneDevice!r}"),
    (lambda: MULTI("slurm"), InvalidArgumentError, NO_RESOLVER.format("str")),
    (lambda: MULTI(CommunicationOptions()), InvalidArgumentError, NO_RESOLVER.format("CommunicationOptions")),
    (lambda: MIRRORED(communication_options={}), InvalidArgumentError, "must be CommunicationOptions or None; got {}"),
    (lambda: MULTI(communication_options={}), InvalidArgumentError, "must be CommunicationOptions or None; got {}"),
]


def test_what_is_refused_on_every_rank(together):
    for make, error, message in REFUSED:
        refused(error, message, make)


def packs(count):
    return CommunicationOptions(num_packs=count)


# what the last rank passes, and the others do not; what it raises, and all are told
DIFFERENT = {
    "devices": (lambda odd: MIRRORED("odd" if odd else None), TypeError, "devices"),
    "no ops": (lambda odd: MIRRORED(cross_device_ops=7 if odd else None), TypeError, "cross_device_ops"),
    "ops": (
        lambda odd: MIRRORED(cross_device_ops=ReductionToOneDevice() if odd else HierarchicalAllReduce()),
        *(AgreementError, r"cross_device_ops=HierarchicalAllReduce(.|\n)*=ReductionToOneDevice"),
    ),
    "packs": (lambda odd: MIRRORED(communication_options=packs(1 + odd)), AgreementError, "num_packs.*2"),
    "packs of workers": (lambda odd: MULTI(communication_options=packs(1 + odd)), AgreementError, "num_packs.*2"),
    "jobs": (lambda odd: MPIClusterResolver({"worker": 99} if odd else None), LaunchError, "jobs"),
    "GPUs": (lambda odd: SlurmClusterResolver(gpus_per_node=99 * (not odd), gpus_per_task=5), LaunchError, "the node has 0"),
    "a task": (lambda odd: MULTI(worker(9 * odd, "a:1")), InvalidArgumentError, "task id 9 is not in job 'worker'"),
    "clusters": (
        lambda odd: MULTI(worker(0, f"w{odd:d}:1")),
        *(AgreementError, r"ranks? 0.*: ClusterSpec\({'worker': \['w0:1'\]}\), read from the cluster resolver"),
    ),
    "no cluster": (lambda odd: MULTI(Moody(odd)), OSError, "no cloud today"),
}


@needs_ranks(2)
def test_what_one_rank_passes_is_refused_on_all(comm, together):
    is_odd = comm.rank == comm.size - 1
    for what, (make, error, message) in DIFFERENT.items():
        with case(what), pytest.raises(error if is_odd else AgreementError, match=message):
            make(is_odd)


class TestMirrored:
    def test_the_list_names_each_rank_in_order_and_one_rank_as_the_cpu(self, comm, make_strategy, together):
        names, cpu = [f"rank:{rank}" for rank in range(comm.size)], [["/cpu:0"]]
        expected = tuple(CPU.format(rank) for rank in range(comm.size))
        given = [None, names, tuple(names), [device_name(rank) for rank in range(comm.size)]]
        for devices in given + cpu * (comm.size == 1):
            strategy = make_strategy(mpistrat.MirroredStrategy, devices)
            assert strategy.num_replicas_in_sync == comm.size
            assert strategy.extended.worker_devices == strategy.extended.parameter_devices == expected
            assert strategy.cluster_resolver is None
            assert all_reduced(strategy, np.ones(2)).tolist() == [comm.size] * 2
        for devices in [*cpu, names[:-1], names[::-1]] * (comm.size > 1):
            message = f"devices={devices}{NOT_EACH}{comm.size} ranks, and a replica runs on each: pass devices=None or {names}"
            refused(InvalidArgumentError, message, lambda: mpistrat.MirroredStrategy(devices))  # noqa: B023

    @needs_ranks(2)
    def test_a_job_on_several_nodes_is_refused(self, comm, together, monkeypatch):
        monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", f"{comm.size}x1")
        told = f"{comm.size} ranks on {comm.size} nodes"
        assert refused(LaunchError, told, mpistrat.MirroredStrategy).raised_everywhere


class TestMultiWorker:
    def test_by_default_every_rank_is_a_worker(self, comm, strategy, world, monkeypatch):
        resolver = strategy.cluster_resolver
        assert isinstance(resolver, MPIClusterResolver)
        assert resolver.get_task_info() == ("worker", comm.rank)
        hosts = [world.place(rank).node.name for rank in range(comm.size)]
        addresses = resolver.cluster_spec().job_tasks("worker")
        if world.num_nodes > 1:
            assert addresses == [f"{host}:{8888 + world.place(rank).local_rank}" for rank, host in enumerate(hosts)]
        assert len(set(addresses)) == comm.size
        assert strategy.extended.worker_devices == (CPU.format(comm.rank),)
        assert strategy.extended.should_checkpoint == strategy.extended.should_save_summary == (comm.rank == 0)

    def test_a_resolver_says_who_is_the_chief_which_may_be_that_of_mpi_or_an_empty_one(self, comm, make_strategy):
        # ranks in turn, the last one is the chief
        cluster = {"chief": ["c:1"], "worker": [f"w{rank}:1" for rank in range(comm.size - 1)]}
        is_chief = comm.rank == comm.size - 1
        task_type, task_id = ("chief", 0) if is_chief else ("worker", comm.rank)
        resolver = SimpleClusterResolver(mpistrat.ClusterSpec(cluster), task_type=task_type, task_id=task_id)
        strategy = make_strategy(mpistrat.MultiWorkerMirroredStrategy, resolver)
        assert strategy.cluster_resolver is resolver
        assert (strategy.extended.should_checkpoint, strategy.extended.should_save_summary) == (is_chief, is_chief)
        assert all_reduced(strategy, np.ones(2)).tolist() == [comm.size] * 2
        for resolver in (TFConfigClusterResolver(), SimpleClusterResolver(mpistrat.ClusterSpec({}))):
            strategy = make_strategy(mpistrat.MultiWorkerMirroredStrategy, resolver)
            assert strategy.num_replicas_in_sync == comm.size
            assert strategy.extended.should_checkpoint == (comm.rank == 0)
        resolver = MPIClusterResolver({"worker": comm.size - 1, "chief": 1}, port_base=5000, rpc_layer="grpc")
        is_last = comm.rank == comm.size - 1
        assert resolver.get_task_info() == (("chief", 0) if is_last else ("worker", comm.rank))
        assert re.fullmatch(r"grpc://.+:50\d\d", resolver.master())
        assert comm.allgather(resolver.cluster_spec()) == [resolver.cluster_spec()] * comm.size
        slurm = SlurmClusterResolver({"worker": comm.size - 1, "chief": 1}, 5000, gpus_per_node=comm.size, gpus_per_task=1)
        assert (slurm.cluster_spec(), slurm.get_task_info()) == (resolver.cluster_spec(), resolver.get_task_info())
        assert (slurm.master(), slurm.num_accelerators()) == (resolver.master(), {"GPU": 1})
        assert make_strategy(mpistrat.MultiWorkerMirroredStrategy, resolver).extended.should_checkpoint == is_last

    @pytest.mark.parametrize("is_of_node", [False, True], ids=["each rank", "a node and all its ranks"])
    def test_tf_config_of(self, comm, monkeypatch, make_strategy, is_of_node):
        workers = ["w:1"] if is_of_node else [f"w{rank}:1" for rank in range(comm.size)]
        index, chief = (0, 0) if is_of_node else (comm.size - 1 - comm.rank, comm.size - 1)
        task = {"type": "worker", "index": index}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": workers}, "task": task}))
        strategy = make_strategy()
        assert type(strategy.cluster_resolver) is TFConfigClusterResolver
        assert strategy.extended.should_checkpoint == (comm.rank == chief)

    @needs_ranks(2)
    def test_a_job_without_tasks_is_none(self, comm, make_strategy):
        resolver = MPIClusterResolver(chief=1)
        assert resolver.cluster_spec().jobs == ["chief", "worker"]
        assert make_strategy(mpistrat.MultiWorkerMirroredStrategy, resolver).is_chief == (comm.rank == 0)

    @needs_ranks(2)
    def test_tf_config_on_one_rank_only_or_that_one_rank_cannot_read(self, comm, monkeypatch, together):
        if comm.rank == 0:
            monkeypatch.setenv("TF_CONFIG", "{}")
        with pytest.raises(AgreementError, match=r"cluster_resolver=TFConfigClusterResolver(.|\n)*=MPIClusterResolver"):
            mpistrat.MultiWorkerMirroredStrategy()
        monkeypatch.setenv("TF_CONFIG", "{" if comm.rank == 1 else "{}")
        with pytest.raises(InvalidArgumentError if comm.rank == 1 else AgreementError, match="TF_CONFIG='{' is not valid JSON"):
            mpistrat.MultiWorkerMirroredStrategy()

    def test_its_old_name(self, comm, make_strategy, together):
        with pytest.warns(DeprecationWarning, match="experimental.MultiWorkerMirroredStrategy is deprecated; use mpistrat.Mu"):
            strategy = make_strategy(ExperimentalMultiWorkerMirroredStrategy, "ring")
        assert isinstance(strategy, mpistrat.MultiWorkerMirroredStrategy)
        assert isinstance(make_strategy(), ExperimentalMultiWorkerMirroredStrategy)
        assert not isinstance(mpistrat.OneDeviceStrategy(), ExperimentalMultiWorkerMirroredStrategy)
        assert not isinstance(strategy, type("Heir", (ExperimentalMultiWorkerMirroredStrategy,), {}))
        assert all_reduced(strategy, np.ones(2)).tolist() == [comm.size] * 2
        with (
            pytest.warns(DeprecationWarning, match="is deprecated"),
            pytest.raises(InvalidArgumentError, match="AUTO, RING, NCCL"),
        ):
            ExperimentalMultiWorkerMirroredStrategy("carrier pigeon")

    @needs_ranks(2)
    @pytest.mark.parametrize("kind", [mpistrat.MirroredStrategy, mpistrat.MultiWorkerMirroredStrategy])
    def test_ranks_that_come_late_but_in_time(self, comm, kind, make_strategy):
        if comm.rank == 0:
            time.sleep(0.2)
        strategy = make_strategy(kind, communication_options=CommunicationOptions(timeout_seconds=30))
        assert strategy.num_replicas_in_sync == comm.size


class TestCentralStorage:
    def test_it_says_where_variables_are_kept_and_updates_them_there(self, comm, make_strategy):
        last = comm.size - 1
        strategy = make_strategy(CentralStorageStrategy, parameter_device=f"rank:{last}")
        assert strategy.extended.worker_devices == tuple(CPU.format(rank) for rank in range(comm.size))
        assert strategy.extended.parameter_devices == (CPU.format(last),)
        assert (strategy.num_replicas_in_sync, strategy.cluster_resolver) == (comm.size, None)
        assert make_strategy(CentralStorageStrategy).extended.parameter_devices == (CPU.format(0),)
        assert make_strategy(CentralStorageStrategy, parameter_device="/cpu:0").extended.parameter_devices == (CPU.format(0),)
        assert isinstance(strategy.extended.cross_device_ops, ReductionToOneDevice)
        variable = made(strategy, np.zeros(2))

        def step(new):
            mpistrat.get_replica_context().update(variable, lambda _, new: new, (new,))
            return variable.numpy().copy()

        held = strategy.local(strategy.run(step, args=(np.full(2, comm.rank + 1.0),)))
        assert held.tolist() == [comm.size] * 2

    def test_a_gradient_is_reduced_to_the_variable(self, comm, make_strategy):
        strategy = make_strategy(CentralStorageStrategy, parameter_device=f"rank:{comm.size - 1}")
        extended = strategy.extended
        variable = made(strategy, np.zeros(2))
        gradient = strategy.run(lambda: np.full(2, comm.rank + 1.0))
        total = comm.size * (comm.size + 1) / 2
        reduced = extended.reduce_to("sum", gradient, variable)
        if comm.size > 1:
            assert reduced.is_here == (comm.rank == comm.size - 1), "the variable stands for the rank that keeps it"
        extended.update(variable, lambda kept, step: kept.assign_add(step), args=(reduced,))
        assert variable.numpy().tolist() == [total] * 2
        [again] = extended.batch_reduce_to("mean", [(gradient, variable)])
        extended.update(variable, lambda kept, step: kept.assign_sub(step), kwargs={"step": again})
        assert variable.numpy().tolist() == [total - total / comm.size] * 2
        sent = extended.broadcast_to(np.full(2, 7.0), variable)
        extended.update(variable, lambda kept, value: kept.assign(value), args=(sent,))
        assert variable.numpy().tolist() == [7.0, 7.0]

    def test_what_is_on_read_acts_as_on_write_and_values_of_several_components_are_refused(self, comm, make_strategy, together):
        strategy, kind = make_strategy(CentralStorageStrategy), mpistrat.VariableSynchronization.ON_READ
        on_read = made(strategy, 1.0, synchronization=kind, aggregation=mpistrat.VariableAggregation.SUM)
        strategy.run(lambda: on_read.assign_add(2.0))
        held = strategy.local(strategy.run(lambda: float(on_read)))
        assert (held, float(on_read.assign_add(1.0))) == (1 + 2 * comm.size, 2 + 2 * comm.size)
        variable = made(strategy, np.zeros(2))
        several = [mpistrat.PerReplica(np.ones(2)), *([mpistrat.Mirrored(np.ones(2))] if comm.size > 1 else [])]
        update = lambda value: strategy.extended.update(variable, lambda kept, new: kept.assign(new), args=(value,))  # noqa: E731
        for value in several:
            message = f"extended.update got {value!r}, which has {comm.size} components; the variable has one: reduce the "
            refused(InvalidArgumentError, message, partial(update, value))
        update(variable)

    def test_devices_that_there_are_not(self, comm, together):
        last = "rank:0" if comm.size == 1 else f"rank:0 to rank:{comm.size - 1}"
        message = f"device 'rank:99' does not exist: there is no rank 99; accepted are /cpu:0 (each rank's own) and {last}"
        refused(InvalidArgumentError, message, lambda: CentralStorageStrategy(parameter_device="rank:99"))
        refused(InvalidArgumentError, message, lambda: CentralStorageStrategy(["rank:99"]))
        refused(InvalidArgumentError, f"compute_devices=[]{NOT_EACH}", lambda: CentralStorageStrategy([]))
        refused(TypeError, "compute_devices must be None or a list of device names", lambda: CentralStorageStrategy("/cpu:0"))

    def test_several_nodes_are_refused(self, comm, world, together):
        if world.num_nodes == 1:
            CentralStorageStrategy().close()
            return
        message = f"CentralStorageStrategy trains on the ranks of one node, but this job has {comm.size} ranks on "
        error = refused(LaunchError, message, CentralStorageStrategy)
        assert error.raised_everywhere
        assert str(error).endswith("Use MultiWorkerMirroredStrategy to train one model on all of them, or launch on one node.")


def test_one_device_computes_here_alone(comm):
    for device in ("/cpu:0", "cpu", "/job:localhost/replica:0/task:0/device:CPU:0", "rank:0"):
        strategy = mpistrat.OneDeviceStrategy(device)
        assert strategy.extended.worker_devices == strategy.extended.parameter_devices == ("/cpu:0",)
        assert (strategy.num_replicas_in_sync, strategy.cluster_resolver) == (1, None)
        assert strategy.extended.should_checkpoint
        total = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", np.full(2, comm.rank)))
        assert total.tolist() == [comm.rank] * 2


def test_ops_of_the_user_are_named_without_their_address(comm, make_strategy):
    class Mine(HierarchicalAllReduce):
        __repr__ = object.__repr__

    assert isinstance(make_strategy(mpistrat.MirroredStrategy, cross_device_ops=Mine()).extended.cross_device_ops, Mine)


def test_a_rendezvous_that_not_all_ranks_enter(comm, monkeypatch):
    never = SimpleNamespace(Test=lambda: False)
    alone = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 3, Idup=lambda: (None, never))
    monkeypatch.setattr("mpistrat.groups.rendezvous.bootstrap.start", lambda: alone)
    began, soon = time.monotonic(), CommunicationOptions(timeout_seconds=0.05)
    for make in (
        lambda: rendezvous("the test", 0.05).__enter__(),
        lambda: mpistrat.MirroredStrategy(communication_options=soon),
        lambda: mpistrat.MultiWorkerMirroredStrategy(communication_options=soon),
    ):
        told = f"rank {comm.rank}: timeout waiting for the cluster: after 0.05 s some of the 3 ranks had not entered"
        error = refused(DeadlineExceededError, told, make)
        assert isinstance(error, RuntimeError)
        assert isinstance(error, TimeoutError)
    monkeypatch.setenv("MPISTRAT_TIMEOUT_SECONDS", "0.05")
    refused(DeadlineExceededError, "had not entered MultiWorkerMirroredStrategy.", mpistrat.MultiWorkerMirroredStrategy)
    assert 0.2 <= time.monotonic() - began < 20
