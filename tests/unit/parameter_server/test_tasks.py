"""Which clusters train with parameter servers; what servers do with requests, the dispatcher says, and partitioners cut."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import CancelledError, InvalidArgumentError, LaunchError
from mpistrat.experimental.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
from mpistrat.parameter_server import dispatcher
from mpistrat.parameter_server.coordinator import ClusterCoordinator
from mpistrat.parameter_server.dispatcher import Dispatcher, RemoteValue, ScheduledCall
from mpistrat.parameter_server.functions import Pickled, dumps
from mpistrat.parameter_server.messages import Channel, Read, Received, Result, Run, Write
from mpistrat.parameter_server.server import VariableServer
from mpistrat.parameter_server.strategy import check_partition, check_tasks
from mpistrat.parameter_server.variables import StoredVariable
from mpistrat.state.changes import METHODS

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
        check_tasks(mpistrat.ClusterSpec(cluster))


def server(*arguments, **named):
    return mpistrat.Server(*arguments, start=False, **named)


def test_without_cloudpickle_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("mpistrat.parameter_server.strategy.find_spec", {}.get)
    with pytest.raises(LaunchError, match=r"cloudpickle, which is not installed: pip install '\.\[parameter-server\]'"):
        check_tasks(mpistrat.ClusterSpec(GOOD))


def test_a_server_knows_its_task_and_what_a_function_there_gets_can_be_used_like_an_array():
    made = server(GOOD, "worker", 1)
    assert made.server_def == {"cluster": GOOD, "job_name": "worker", "task_index": 1, "protocol": "mpi"}
    assert made.target == "mpi://b:2"
    assert server(made.server_def).server_def == made.server_def
    assert server(made.server_def, task_index=0).target == "mpi://b:1"
    assert server({"ps": ["c:1"]}).server_def["job_name"] == "ps", "the only task"
    assert server(mpistrat.ClusterSpec(GOOD), "ps", protocol="grpc").target == "grpc://c:1"
    with pytest.raises(RuntimeError, match=r"call start\(\) on all ranks before join\(\)"):
        made.join()
    array = np.arange(6.0).reshape(3, 2)
    stored = StoredVariable("stored", array)
    assert (stored.shape, stored.dtype, len(stored), (stored * 2)[2, 1], np.sum(stored)) == ((3, 2), np.float64, 3, 10, 15)
    stored.value += 1
    stored.value = stored / 2
    np.testing.assert_array_equal(array, np.arange(1.0, 7).reshape(3, 2) / 2)
    stored.numpy()[...] = stored.sparse_read([0])[...] = 0  # copies
    np.testing.assert_array_equal(stored.sparse_read([[2], [0]]), array[[[2], [0]]])
    with pytest.raises(TypeError, match=r"cannot be the target of an in-place(.|\n)*or variable.value\[index\]"):
        stored += 1


def strategy(resolver, *arguments, **named):
    return mpistrat.experimental.ParameterServerStrategy(resolver, *arguments, **named)


def task(task_type):
    return mpistrat.cluster_resolver.SimpleClusterResolver(mpistrat.ClusterSpec(GOOD), task_type=task_type, task_id=0)


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
        (lambda: ClusterCoordinator(mpistrat.OneDeviceStrategy()), "works with a ParameterServerStrategy; got"),
    ],
)
def test_what_a_server_a_strategy_or_a_coordinator_cannot_take_is_refused(make, message):
    with pytest.raises(TypeError if "ClusterSpec" in message else InvalidArgumentError, match=message):
        make()


@pytest.mark.parametrize("change", [Write(0, 1, 0), Write(0, METHODS.index("scatter_add"), 3), Run(7, 0, 0, False)], ids=repr)
def test_a_variable_is_changed_only_when_no_answer_is_being_sent_from_its_array(change):
    array, other, waited = np.zeros(3), np.zeros(3), []
    channel = MagicMock(survives=False)
    channel.have_ended.return_value = False
    channel.wait.side_effect = lambda requests, *given, **named: waited.append((requests, array.tolist()))
    server = VariableServer(channel)
    server._variables.update({0: StoredVariable("read", array), 1: StoredVariable("other", other)})
    for variable, request in ((0, "of read"), (1, "of other")):
        channel.send_bare.return_value = [request]
        read = Read(5, variable, 0, 3)
        server.read(read, Received(2, read, -1, 0, None))

    def add(variable):
        variable.value += 1

    channel.receive_payload.side_effect = partial(Channel.receive_payload, channel)
    channel.payload.return_value = pickle.dumps(((), {}))
    server._functions[3, 0] = lambda worker: add
    inline = memoryview((b"" if change == Write(0, 1, 0) else np.arange(3).tobytes()) + np.ones(3).tobytes())
    getattr(server, type(change).__name__.lower())(change, Received(3, change, -1, inline.nbytes, inline))
    assert waited == [(["of read"], [0, 0, 0])]
    assert array.tolist() == [1, 1, 1]


def made(monkeypatch, results):
    """Return a dispatcher of one worker that gets some results, and then none."""
    channel = MagicMock(lost=frozenset(), survives=False)
    channel.workers, channel.payload.return_value = (1,), b""
    receiver = SimpleNamespace(peek=lambda: next(results, None), accept=lambda: None)
    monkeypatch.setattr(dispatcher, "Receiver", lambda *arguments: receiver)
    client = MagicMock(channel=channel, dropped=[])
    client.functions.send.return_value = 0
    return Dispatcher(client)


def test_it_is_idle_only_when_the_result_that_has_come_is_there(monkeypatch):
    value, looked = MagicMock(), []
    call = ScheduledCall(MagicMock(number=0), Pickled(b"", []), value)
    found = made(monkeypatch, iter([None, Received(1, Result(call.number, False), -1, 0, memoryview(b""))]))
    monkeypatch.setattr(found, "_beside", MagicMock())
    found.submit(call)
    with ThreadPoolExecutor(1) as program:

        def look(data):
            asked = program.submit(found.is_idle)
            time.sleep(0.05)
            looked.append(asked.done() and asked.result())

        value.set_data = look
        assert not found.is_idle()
        found.pump()
    assert looked == [False]
    assert found.is_idle()


def test_of_two_threads_one_raises_and_loads_what_both_wait_for(monkeypatch):
    found = made(monkeypatch, iter([]))
    found._error = ValueError("of a function")
    monkeypatch.setattr(found, "wait", lambda *arguments: setattr(found, "_error", None))  # the other one raises it meanwhile
    found.raise_error()
    found = [dumps(3, "a result"), None]  # at a first and a second look
    monkeypatch.setattr(RemoteValue, "_data", property(lambda _: found.pop(0), lambda *_: None), raising=False)
    assert RemoteValue(MagicMock()).fetch() == 3


def test_an_interrupt_loses_no_call(monkeypatch):
    call = ScheduledCall(MagicMock(number=0), Pickled(b"", []), RemoteValue(MagicMock()))
    found = made(monkeypatch, iter([None, None, Received(1, Result(call.number, False), -1, 0, memoryview(b""))]))
    monkeypatch.setattr(found, "_beside", MagicMock())
    send = found._client.functions.send
    send.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        found.submit(call)
    send.side_effect = None
    found.pump()
    assert (send.call_count, found.is_idle()) == (2, False)
    call.value.set_data = MagicMock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        found.pump()
    assert found.is_idle()
    with pytest.raises(CancelledError, match="was given up"):
        call.value.fetch()


@pytest.mark.parametrize(
    ("partitioner", "shape", "shards"),
    [
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(4), (2, 3), [2, 1]),
        (FixedShardsPartitioner(4), (0,), [1]),
        (MinSizePartitioner(4), (6, 1), [1, 1]),
        (MinSizePartitioner(4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(4, max_shards=100), (6, 1), [6, 1]),
        (MinSizePartitioner(10, max_shards=100), (6, 1), [2, 1]),
        (MinSizePartitioner(25, max_shards=100), (6, 1), [1, 1]),
        (MinSizePartitioner(max_shards=3), (100, 100), [1, 1]),
        (MinSizePartitioner(max_shards=3), (1 << 20,), [3]),
        (MaxSizePartitioner(24), (6, 1), [1, 1]),
        (MaxSizePartitioner(23), (6, 1), [2, 1]),
        (MaxSizePartitioner(8), (6, 1), [3, 1]),
        (MaxSizePartitioner(4), (6, 1), [6, 1]),
        (MaxSizePartitioner(1), (6, 1), [6, 1]),
        (MaxSizePartitioner(4, max_shards=3), (6, 1), [3, 1]),
        (MaxSizePartitioner(1024), (0, 4), [1, 1]),
    ],
)
def test_the_number_of_shards(partitioner, shape, shards):
    assert partitioner(shape, np.float32) == shards


def test_another_axis_may_be_split():
    assert FixedShardsPartitioner(3)((10, 6), np.float32, axis=1) == [1, 3]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (FixedShardsPartitioner, [0]),
        *((kind, arguments) for kind in (MinSizePartitioner, MaxSizePartitioner) for arguments in ([0], [1, 0], [1, 1, 0])),
    ],
)
def test_an_argument_below_1_is_refused(kind, arguments):
    with pytest.raises(InvalidArgumentError, match="must be at least 1; got 0"):
        kind(*arguments)


@pytest.mark.parametrize("wrong", [[], [0, 1], [2], [2, 2], [2, 1, 1], "2", 2, None])
def test_what_is_no_partition_is_refused(wrong):
    with pytest.raises(InvalidArgumentError, match=r"accepted is a list .* for example \[2, 1\]"):
        check_partition(wrong, (10, 3))
    assert check_partition([5, 1], (3, 2)) == 3  # no more shards than rows
    assert check_partition([2], (10,)) == 2
