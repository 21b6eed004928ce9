"""Parameter servers: variables on servers, and functions that workers run; 1 chief, 1 or 2 servers, the other ranks workers.

The lane has 3, 4 and 8 ranks; `--num-ranks 5` gives 1+1+3 and 1+2+2.
"""

import copy
import gc
import itertools
import os
import pickle
import sys
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path

import numpy as np
import pytest

import mpistrat
from mpistrat.cluster_resolver import MPIClusterResolver, SimpleClusterResolver, TFConfigClusterResolver
from mpistrat.errors import (
    AgreementError,
    CancelledError,
    CollectiveError,
    DeadlineExceededError,
    InvalidArgumentError,
    LaunchError,
    OutOfRangeError,
    SettingError,
    UnsupportedDtypeError,
)
from mpistrat.experimental import ParameterServerStrategy, ShardedVariable, embedding_lookup
from mpistrat.experimental.coordinator import ClusterCoordinator, PerWorkerValues, RemoteValueStatus
from mpistrat.experimental.partitioners import FixedShardsPartitioner, MinSizePartitioner
from mpistrat.launch.bootstrap import start
from mpistrat.parameter_server.client import current_client
from mpistrat.parameter_server.functions import dumps
from mpistrat.parameter_server.messages import REQUEST, Run
from mpistrat.parameter_server.variables import StoredVariable
from tests.launches import needs_ranks, up_to_ranks
from tests.processes import until

pytestmark = needs_ranks(4)
of_servers = up_to_ranks(4)  # what the chief and the servers do is the same with more workers


@pytest.fixture(params=[1, 2])
def run(request):
    """Give what calls a function with a coordinator on the chief, and serves on the other ranks."""
    if start().size < request.param + 2:
        pytest.skip("each server needs a rank")
    return partial(serve, request.param)


def on_chief(partitioner=None):
    """Have the chief run a test with its coordinator, while the other ranks serve; a test may get a number of shards."""

    def made(test):
        def served(run, **given):
            run(partial(test, **given), FixedShardsPartitioner(given["num_shards"]) if "num_shards" in given else partitioner)

        served.__name__, served.__doc__, served.__module__ = test.__name__, test.__doc__, test.__module__
        others = [one for name, one in signature(test).parameters.items() if name != "coordinator"]
        served.__signature__ = Signature([Parameter("run", Parameter.POSITIONAL_OR_KEYWORD), *others])
        return served

    return made


def serve(num_servers, program, partitioner=None, **named):
    resolver = MPIClusterResolver(chief=1, ps=num_servers)
    return ParameterServerStrategy.main(program, resolver, partitioner, **named)


def variable(coordinator, value, **named):
    with coordinator.strategy.scope():
        return mpistrat.Variable(value, **named)


def test_main_returns_what_the_program_returns_on_the_chief_alone(run):
    got = run(lambda coordinator: type(coordinator.strategy).__name__)
    assert got == ("ParameterServerStrategy" if start().rank == 0 else None)


@of_servers
@pytest.mark.parametrize("dtype", ["float64", "float32", "int8", "bool", "complex128", "bfloat16"])
@on_chief(FixedShardsPartitioner(2))
def test_a_variable_reads_as_what_was_assigned(coordinator, dtype):
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    for extents in ((), (0,), (5,), (7, 3), (3, 0), (2000, 17)):
        first = np.arange(np.prod(extents)).reshape(extents).astype(kind)
        whole = variable(coordinator, first, name="whole")
        assert isinstance(whole, mpistrat.Variable)
        assert (whole.shape, whole.dtype, whole.name, whole.nbytes) == (extents, kind, "whole", first.nbytes)
        for _ in range(2):
            np.testing.assert_array_equal(whole.numpy(), first)
            np.testing.assert_array_equal(coordinator.schedule(lambda whole=whole: whole.numpy()).fetch(), first)
            first = (first + np.ones(extents, kind)).astype(kind)
            assert whole.assign(first) is whole


@of_servers
@on_chief(FixedShardsPartitioner(2))
def test_assign_add_sub(coordinator):
    whole, number = variable(coordinator, np.zeros((4, 2))), variable(coordinator, 5)
    large = variable(coordinator, np.zeros((300, 100)))
    whole.assign_add(np.full((4, 2), 3.0))
    whole.assign_sub(np.ones((4, 2)))
    assert number.assign_add(2, read_value=False) is None
    large.assign_add(np.ones((300, 100)))
    large.assign_sub(np.full((300, 100), 4))
    np.testing.assert_array_equal(whole, np.full((4, 2), 2.0))
    assert (int(number), float(large[0, 0])) == (7, -3.0)
    with pytest.raises(InvalidArgumentError, match=r"has shape \(4, 2\); a value of shape \(2,\)"):
        whole.assign([1.0, 2.0])
    with pytest.raises(UnsupportedDtypeError, match="cannot hold a value of dtype float64"):
        number.assign(2.5)
    with pytest.raises(UnsupportedDtypeError, match="not defined for bool"):
        variable(coordinator, True).assign_sub(True)


METHODS = ["add", "sub", "mul", "div", "min", "max", "update"]


@of_servers
@pytest.mark.parametrize("method", METHODS)
@on_chief(FixedShardsPartitioner(3))
def test_scatter_does_what_it_does_to_an_ordinary_variable(coordinator, method):
    slices = mpistrat.IndexedSlices(np.array([[2.0, 5], [3, 7], [-1, 9], [4, 4]]), [6, 0, 6, 3])

    wanted = mpistrat.Variable(np.arange(1.0, 15).reshape(7, 2))
    table = variable(coordinator, wanted.numpy())
    assert getattr(table, f"scatter_{method}")(slices) is table
    np.testing.assert_array_equal(table, getattr(wanted, f"scatter_{method}")(slices))
    with pytest.raises(InvalidArgumentError, match="index 7 is out of range"):
        table.scatter_add(mpistrat.IndexedSlices(np.ones((1, 2)), [7]))
    table.scatter_add(mpistrat.IndexedSlices(np.ones((0, 2)), np.zeros(0, int)))
    np.testing.assert_array_equal(table, wanted)


SLICES = [slice(None), slice(2, 9), slice(None, None, 3), slice(None, None, -2), slice(8, 1, -3), slice(4, 4)]
INDICES = [*SLICES, 3, -1, (slice(1, 7), 1), (2, slice(None, None, -1)), [1, 9, 1], ([3, -1, 3], 1), np.arange(10) > 6, ...]


@of_servers
@pytest.mark.parametrize("num_shards", [1, 2, 3, 10])
@on_chief()
def test_slices_are_those_of_numpy(coordinator, num_shards):
    wanted = np.arange(20).reshape(10, 2)
    table = variable(coordinator, wanted)
    for index in INDICES:
        np.testing.assert_array_equal(table[index], wanted[index], err_msg=str(index))
    with pytest.raises(IndexError):
        table[10]
    with pytest.raises(IndexError, match="rows must be -10 to 9; got 3 to 10"):
        table[[3, 10]]
    np.testing.assert_array_equal(table + 1, wanted + 1)
    np.testing.assert_array_equal(np.sum(table, axis=0), wanted.sum(axis=0))
    assert len(table) == 10


@of_servers
@pytest.mark.parametrize("num_shards", [1, 2, 5])
@on_chief()
def test_rows_are_read_by_their_ids(coordinator, num_shards):
    wanted = np.arange(30.0).reshape(10, 3)
    table = variable(coordinator, wanted)
    for ids in ([4], [9, 0, 9, 5], [[1, 2], [8, 1]], np.zeros(0, int), 7):
        np.testing.assert_array_equal(table.sparse_read(ids), wanted[ids])
        np.testing.assert_array_equal(embedding_lookup(table, ids), wanted[ids])
    with pytest.raises(InvalidArgumentError, match="must be 0 to 9; got -1 to 3"):
        table.sparse_read([3, -1])
    large = variable(coordinator, np.arange(100_000.0).reshape(1000, 100))
    np.testing.assert_array_equal(large.sparse_read(np.arange(0, 1000, 2)), large.numpy()[::2])


@of_servers
@on_chief(FixedShardsPartitioner(5))
def test_rows_are_asked_for_once_for_each_server(coordinator):
    asked = []

    table = variable(coordinator, np.arange(40.0).reshape(20, 2))
    channel, servers = coordinator.strategy.client.channel, coordinator.strategy.extended.parameter_devices
    send = channel.send

    def counted(requests, rank, *frame):
        asked.append((rank, frame))
        return send(requests, rank, *frame)

    channel.send = counted
    ids = [[19, 3, 19], [0, 7, 11]]
    np.testing.assert_array_equal(embedding_lookup(table, ids), np.arange(40.0).reshape(20, 2)[ids])
    channel.send = send
    assert sorted(rank for rank, _ in asked) == list(range(1, 1 + len(servers)))
    assert sum(part.size for _, frame in asked for part in frame[3:]) == 5, "rows 0, 3, 7, 11 and 19, each once"


@of_servers
@on_chief(FixedShardsPartitioner(3))
def test_a_sharded_variable_is_split_evenly(coordinator):
    table = variable(coordinator, np.arange(20).reshape(10, 2), name="table")
    assert isinstance(table, ShardedVariable)
    assert [(part.name, part.shape) for part in table.variables] == [
        ("table/part_0", (4, 2)),
        ("table/part_1", (3, 2)),
        ("table/part_2", (3, 2)),
    ]
    assert list(table) == table.variables
    np.testing.assert_array_equal(np.concatenate(table.variables), table)
    again = ShardedVariable(table.variables[1:], "again")
    np.testing.assert_array_equal(again, table[4:])
    with pytest.raises(InvalidArgumentError, match="must have the same dtype; got int64, float64"):
        ShardedVariable([table.variables[0], *variable(coordinator, np.ones((6, 2))).variables])
    with pytest.raises(InvalidArgumentError, match="must have the same shape of a row"):
        ShardedVariable([table.variables[0], *variable(coordinator, np.ones((6, 3), int)).variables])
    for wrong in ([], [1], table.variables[0]):
        with pytest.raises(TypeError, match="must be a list of one or more variables that servers keep"):
            ShardedVariable(wrong)


@of_servers
@on_chief(lambda shape, dtype: [2, 1])
def test_initial_values_of_shards_are_made_one_by_one(coordinator):
    asked = []

    def of_shard(shard_info):
        asked.append(tuple(shard_info))
        return np.full(shard_info.shape, shard_info.offset[0])

    def of_partition(shape, dtype, partition_shape=None, partition_offset=None):
        asked.append((partition_shape, partition_offset))
        return np.full(partition_shape or shape, (partition_offset or [0])[0], dtype)

    def ignores(**kwargs):
        return np.arange(10.0).reshape(5, 2)

    for rows in of_shard, partial(of_partition, (5, 2), np.int64):
        table = variable(coordinator, rows, shape=(5, 2), dtype=np.int64)
        np.testing.assert_array_equal(table[:, 0], [0, 0, 0, 3, 3])
    assert asked == 2 * [((3, 2), (0, 0)), ((2, 2), (3, 0))]
    np.testing.assert_array_equal(variable(coordinator, ignores, shape=(5, 2), dtype=np.float64), ignores())
    np.testing.assert_array_equal(variable(coordinator, lambda: [[1.0], [2.0]]), [[1], [2]])
    with pytest.raises(InvalidArgumentError, match=r"must have shape \(3, 2\); got an initial value of shape \(3, 1\)"):
        variable(coordinator, lambda **kwargs: np.zeros((3, 1)), shape=(5, 2), dtype=np.float64)


@of_servers
@on_chief(lambda shape, dtype: [2, 2])
def test_variables_that_cannot_be_are_refused(coordinator):
    with pytest.raises(InvalidArgumentError, match="needs an initial_value"):
        variable(coordinator, None)
    with pytest.raises(NotImplementedError, match="there is one copy of it"):
        variable(coordinator, 1.0, synchronization=mpistrat.VariableSynchronization.ON_READ)
    with pytest.raises(InvalidArgumentError, match=r"returned \[2, 2\] for shape \(4, 4\)"):
        variable(coordinator, np.ones((4, 4)))
    with pytest.raises(RuntimeError, match=r"make variables on the chief, in strategy.scope\(\)"):
        coordinator.schedule(lambda: mpistrat.Variable(1.0)).fetch()


@of_servers
@on_chief()
def test_servers_free_the_variables_that_the_chief_drops(coordinator):
    extended, size = coordinator.strategy.extended, 1 << 18
    kept = [variable(coordinator, np.zeros(1)) for _ in extended.server_bytes]

    def num_kept():
        gc.collect()
        coordinator.done()
        return sum(extended.update(one, _bytes_of_large_variables, group=False)[0] for one in kept) // (8 * size)

    def use(table, wanted):
        time.sleep(0.05)
        assert table.assign_add(np.ones(size)).numpy().min() == wanted
        return table

    for _ in range(5):
        table = variable(coordinator, np.zeros(size))
        same = coordinator.schedule(use, (table, 1)).fetch()
        coordinator.schedule(use, (table, 2))
        del table  # while a function that uses it waits, and another object of the same variable is there
    coordinator.join()
    assert same.numpy().max() == 2
    assert until(lambda: num_kept() == 1, 60)
    del same
    assert until(lambda: num_kept() == 0, 60)
    assert extended.server_bytes == (8,) * len(kept)

    table = variable(coordinator, np.zeros(size))
    copies = [copy.copy(table), pickle.loads(pickle.dumps(table)), table[:1], *getattr(table, "variables", [])]
    data = iter(coordinator.create_per_worker_dataset(lambda table=table: itertools.repeat(table)))
    del table
    assert num_kept() == 1
    del copies
    for _ in range(3):
        assert coordinator.schedule(lambda data: next(data).numpy().max(), (data,)).fetch() == 0
    del data
    assert until(lambda: num_kept() == 0, 60)


@of_servers
@on_chief()
def test_what_a_worker_keeps_of_a_dropped_variable_cannot_be_used(coordinator):
    freed = "the variable was dropped by the chief, and its server has freed it"

    def keep(table, held):
        mpistrat.kept_by_a_test = table
        table.assign_add(np.ones(1 << 16), read_value=False)
        Path(held).write_bytes(pickle.dumps(table))

    def use(held):
        for again in (mpistrat.kept_by_a_test, pickle.loads(Path(held).read_bytes())):
            update = mpistrat.get_strategy().extended.update
            for verb, *given in (again.numpy,), (again.sparse_read, [0]), (update, again, abs):
                with pytest.raises(RuntimeError, match=freed):
                    verb(*given)

    def change(rows):
        if rows is None:
            mpistrat.kept_by_a_test.assign(np.zeros(1 << 16), read_value=False)
        else:
            mpistrat.kept_by_a_test.scatter_add(mpistrat.IndexedSlices(np.zeros(rows), np.zeros(rows, int)))

    number = len(coordinator.strategy.extended.worker_devices)
    kept, table = variable(coordinator, [1.0]), variable(coordinator, np.ones(1 << 16))
    with tempfile.TemporaryDirectory() as folder:
        held = str(Path(folder) / "held")
        for _ in range(20 * number):
            coordinator.schedule(keep, (table, held)).fetch()
        del table
        gc.collect()
        assert until(lambda: coordinator.done() and sum(coordinator.strategy.extended.server_bytes) == 8, 60)
        for _ in range(20 * number):
            coordinator.schedule(use, (held,)).fetch()
    for rows in (None, 1, 1 << 16):
        with pytest.raises(RuntimeError, match=freed):
            coordinator.schedule(change, (rows,)).fetch()
        with suppress(RuntimeError):
            coordinator.join()
    assert kept.numpy() == [1]


def _bytes_of_large_variables(stored):
    """Return how many bytes of variables this server keeps, in arrays of more than 1 KiB."""
    found = [one.value.nbytes for one in gc.get_objects() if type(one) is StoredVariable]
    return sum(nbytes for nbytes in found if nbytes > 1024)


@of_servers
def test_bytes_are_even_over_servers():
    if start().size < 4:
        pytest.skip("needs two servers")
    sizes = [100, 1, 90, 3, 5, 80, 30, 64, 7, 2]

    def place(coordinator):
        kept = [variable(coordinator, np.zeros(size)) for size in sizes]
        counted = coordinator.strategy.extended.server_bytes
        assert sum(counted) == sum(one.nbytes for one in kept) == 8 * sum(sizes)
        return counted

    even, in_turn = serve(2, place), serve(2, place, placement="round_robin")
    if start().rank == 0:
        assert max(even) <= 1.1 * sum(even) / 2
        assert in_turn == (8 * sum(sizes[::2]), 8 * sum(sizes[1::2]))


@of_servers
def test_variables_may_be_placed_together():
    if start().size < 4:
        pytest.skip("needs two servers")

    def program(coordinator):
        first, second = (variable(coordinator, np.zeros(4)) for _ in range(2))
        assert (first.server, second.server) == (0, 1)
        extended = coordinator.strategy.extended
        with extended.colocate_vars_with(second):
            beside = [variable(coordinator, np.zeros(100)) for _ in range(3)]
        assert [one.server for one in beside] == [1, 1, 1]
        assert all(type(one) is not ShardedVariable for one in beside)
        assert extended.variable_created_in_scope(first)
        with (
            pytest.raises(InvalidArgumentError, match="takes a variable of this strategy; got 3"),
            extended.colocate_vars_with(3),
        ):
            pass

    serve(2, program, MinSizePartitioner(64, max_shards=2))


def momentum(variable, gradient, rate, decay=0.9):
    velocity = variable.slot("velocity")
    velocity[...] = decay * velocity + gradient
    variable.value[...] -= rate * velocity
    return len(gradient)


@of_servers
@on_chief(FixedShardsPartitioner(2))
def test_a_function_updates_a_variable_where_it_lives(coordinator):
    gradient = np.arange(10.0).reshape(5, 2)

    table, update = variable(coordinator, np.ones((5, 2))), coordinator.strategy.extended.update
    wanted, velocity = np.ones((5, 2)), np.zeros((5, 2))
    for rate in (0.5, 0.1):
        assert update(table, momentum, (gradient,), {"rate": rate}) is None
        velocity = 0.9 * velocity + gradient
        wanted -= rate * velocity
    np.testing.assert_allclose(table, wanted)
    assert update(table, momentum, (gradient, 0.0), group=False) == [3, 2]
    update(table, lambda var, rows: var.scatter_update(rows), (mpistrat.IndexedSlices(np.zeros((2, 2)), [4, 0]),))
    assert (table[0] == 0).all()
    assert (table[4] == 0).all()
    with pytest.raises(ZeroDivisionError) as caught:
        update(table, lambda var: 1 // 0)
    assert "ps 0 (rank 1" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match="the result of an update of .* cannot be sent"):
        update(table, lambda var: threading.Lock(), group=False)
    with pytest.raises(TypeError, match="changes variables on servers"):
        update(3, momentum)


@of_servers
def test_an_error_in_a_change_is_raised_where_that_was_asked_for(run):
    def program(coordinator):
        number, update = variable(coordinator, np.full(2, 1e200)), coordinator.strategy.extended.update
        update(number, lambda variable: np.seterr(over="raise"))

        def overflow(row):
            number.scatter_mul(mpistrat.IndexedSlices(np.full(1, 1e200), [row]))

        for ask in (
            lambda: coordinator.schedule(overflow, (1,)).fetch(),
            lambda: overflow(1) or coordinator.schedule(abs, (1,)),
        ):
            with pytest.raises(FloatingPointError, match="overflow") as caught:
                ask()
            assert "ps " in str(caught.value.__cause__)
            with suppress(FloatingPointError):
                coordinator.join()
        np.testing.assert_array_equal(number, np.full(2, 1e200))
        overflow(0)

    if start().rank == 0:
        with pytest.raises(FloatingPointError, match="overflow"):
            run(program, FixedShardsPartitioner(1))
    else:
        run(program)


class Planted:
    """Stands in for an array, or is called for one: any use raises an error."""

    def __call__(self, *given):
        raise MemoryError("planted " * 4000)

    def __getattr__(self, name):
        raise MemoryError("planted " * 4000)


@of_servers
@on_chief()
def test_an_error_in_an_answer_is_raised_where_that_was_asked_for(coordinator):
    wanted = np.arange(1_000_000.0).reshape(-1, 2)
    table, update = variable(coordinator, wanted), coordinator.strategy.extended.update
    update(table, lambda stored: setattr(stored, "_component", Planted()))
    asks = table.numpy, lambda: table[:2], lambda: table.sparse_read([1]), lambda: coordinator.schedule(table.numpy).fetch()
    for ask in asks:
        with pytest.raises(MemoryError, match="planted") as caught:
            ask()
        assert "[ps 0 (rank 1" in str(caught.value.__cause__)
        with suppress(MemoryError):
            coordinator.join()
    update(table, lambda stored, array: setattr(stored, "_component", array), (wanted,))
    np.testing.assert_array_equal(table, wanted)
    np.testing.assert_array_equal(coordinator.schedule(lambda: table[[5, 3]]).fetch(), wanted[[5, 3]])


@pytest.mark.parametrize("rows", [10, 100_000])
@of_servers
@on_chief(FixedShardsPartitioner(2))
def test_an_error_may_come_before_the_array_of_an_earlier_shard(coordinator, rows):
    table = variable(coordinator, np.arange(2.0 * rows).reshape(-1, 2))

    def plant(stored):
        if stored.value[0, 0] > 0:  # the second shard of a server
            stored._component = Planted()

    coordinator.strategy.extended.update(table, plant)
    for _ in range(20):
        with pytest.raises(MemoryError, match="planted"):
            table.numpy()


@of_servers
@on_chief()
def test_a_variable_that_no_server_can_keep_is_not_made(coordinator):
    def plant(stored, made):
        sys.modules["mpistrat.parameter_server.server"].StoredVariable = made

    first, extended = variable(coordinator, 1.0), coordinator.strategy.extended
    with extended.colocate_vars_with(first):
        extended.update(first, plant, (Planted(),))
        with pytest.raises(MemoryError, match="planted"):
            variable(coordinator, 2.0)
        extended.update(first, plant, (StoredVariable,))
        assert (sum(extended.server_bytes), variable(coordinator, 3.0).numpy()) == (8, 3)


def cannot_be_unpickled():
    raise RuntimeError("planted")


class Name(str):
    __slots__ = ()

    def __reduce__(self):
        return cannot_be_unpickled, ()


@of_servers
@on_chief()
def test_a_name_that_cannot_be_unpickled_serves(coordinator):
    number = variable(coordinator, 1.0, name=Name("number"))
    assert coordinator.schedule(lambda: (number.name, number.numpy())).fetch() == ("number", 1)


@on_chief(FixedShardsPartitioner(2))
def test_workers_update_variables_where_they_live(coordinator):
    table = variable(coordinator, np.zeros(10))

    def add(variable, delta):
        variable.assign_add(delta)

    def step():
        mpistrat.get_strategy().extended.update(table, add, (np.arange(10.0),))

    for _ in range(20):
        coordinator.schedule(step)
    coordinator.join()
    np.testing.assert_array_equal(table, 20 * np.arange(10))


@up_to_ranks(8)
@on_chief()
def test_no_update_is_lost_and_none_is_seen_by_halves(coordinator):
    table, count = variable(coordinator, np.zeros((1000, 1000))), variable(coordinator, 0)

    def write():
        table.assign_add(np.ones((1000, 1000)))
        count.assign_add(1)

    def read():
        seen = table.numpy()
        assert (seen == seen[0, 0]).all(), "half an update was read"
        return seen[0, 0]

    for _ in range(25):
        coordinator.schedule(write)
        coordinator.schedule(read)
    seen = [read() for _ in range(5)]
    coordinator.join()
    assert seen == sorted(seen)
    assert (int(count), read()) == (25, 25)


def held(variable, folder):
    """Hold the server until the test lets it go, and return more than is sent with a header."""
    (folder / "held").touch()
    until((folder / "let go").exists, 60)
    return bytes(1 << 20)


def update_held(variable, folder):
    return current_client(variable.group).strategy.extended.update(variable, held, args=(folder,), group=False)


@contextmanager
def deadline(variable, seconds=0.1):
    """Give what this rank asks servers for little time."""
    channel = current_client(variable.group).channel
    channel._seconds = seconds
    try:
        yield
    finally:
        channel._seconds = 0


def impatient(variable, folder):
    """Give up, after an update that is still to be confirmed."""
    variable.assign_add(1.0, read_value=False)
    with deadline(variable):
        update_held(variable, folder)


@of_servers
@on_chief()
def test_a_late_answer_arrives_in_memory_that_is_kept(coordinator, tmp_path):
    table = variable(coordinator, np.full(100_000, 42.0))
    value = coordinator.schedule(update_held, (table, tmp_path))
    assert until((tmp_path / "held").exists, 60)
    target = np.zeros(100_000)
    late, client = weakref.ref(target), coordinator.strategy.client
    with deadline(table), pytest.raises(DeadlineExceededError, match="0.1 s for an answer of ps 0 .*: read of"):
        client.read([(table._refs[0], 0, target)])
    del target
    gc.collect()
    (tmp_path / "let go").touch()
    value.fetch()
    assert until(lambda: coordinator.done() and late() is not None and (late() == 42).all(), 60)


@of_servers
@pytest.mark.parametrize("cause", [DeadlineExceededError, KeyboardInterrupt])
@on_chief()
def test_after_a_call_that_was_given_up_no_other_is_made(coordinator, tmp_path, monkeypatch, cause):
    def interrupt(*args, **named):
        raise KeyboardInterrupt

    number = variable(coordinator, 1.0, name="number")
    channel = coordinator.strategy.client.channel
    assert coordinator.schedule(number.numpy).fetch() == 1
    with monkeypatch.context() as patch, deadline(number):
        if cause is KeyboardInterrupt:
            patch.setattr(channel, "wait_until", interrupt)
        with pytest.raises(cause):
            update_held(number, tmp_path)
    (tmp_path / "let go").touch()
    said = rf"chief 0 \(rank 0 on .*\({cause.__name__}\).* answer of ps 0 \(rank 1 on .*: call of held of number"
    for call in (number.numpy, lambda: number.assign(2.0), lambda: update_held(number, tmp_path)):
        with pytest.raises(CollectiveError, match=said):
            call()
    assert coordinator.schedule(number.numpy).fetch() == 1, "the workers go on"


@of_servers
@on_chief()
def test_a_function_that_misses_a_deadline_raises_it(coordinator, tmp_path):
    number = variable(coordinator, 1.0)
    with pytest.raises(DeadlineExceededError, match=r"worker . \(.*: call of held of"):
        coordinator.schedule(impatient, (number, tmp_path)).fetch()
    (tmp_path / "let go").touch()
    assert number.numpy() == 2


@of_servers
@pytest.mark.parametrize("cause", [DeadlineExceededError("planted"), MemoryError("planted"), KeyboardInterrupt()], ids=repr)
@on_chief()
def test_a_result_that_does_not_come_whole_fails_its_function_alone(coordinator, monkeypatch, cause):
    number, wanted = variable(coordinator, 1.0), [bytes([one]) * (1 << 20) for one in range(4)]

    def given_up(*args):
        monkeypatch.undo()
        raise cause

    coordinator.strategy.client.flush()
    monkeypatch.setattr(coordinator.strategy.client.channel, "payload", given_up)
    monkeypatch.setattr(coordinator._dispatcher, "_num_waiting", 1)  # results are taken here, not by the thread beside
    value = coordinator.schedule(wanted.__getitem__, (0,))
    with pytest.raises(type(cause)):
        coordinator.fetch(value)
    if isinstance(cause, KeyboardInterrupt):
        with pytest.raises(CancelledError, match="the result of function list.__getitem__ was given up"):
            coordinator.join()
    coordinator.join()
    for _ in range(2):
        assert coordinator.fetch([coordinator.schedule(wanted.__getitem__, (one,)) for one in (1, 2, 3)]) == wanted[1:]
    assert number.numpy() == 1


@of_servers
@on_chief()
def test_an_answer_to_another_request_is_refused(coordinator):
    number = variable(coordinator, 1.0)
    client = coordinator.strategy.client
    client.channel.send([], 1, REQUEST, Run(777, 0, number._refs[0].number, True), dumps(((), {}), "arguments"))
    with pytest.raises(CollectiveError, match="what came answers request 777"):
        coordinator.strategy.extended.update(number, abs)
    with pytest.raises(CollectiveError, match="no call can reach the servers any more"):
        number.numpy()


@on_chief()
def test_what_the_chief_writes_scheduled_functions_read_and_the_other_way_round(coordinator):
    number = variable(coordinator, 0)
    for turn in range(1, 50):
        number.assign(turn)
        assert coordinator.schedule(lambda: int(number)).fetch() == turn
        coordinator.schedule(lambda: number.assign_add(1000, read_value=False)).fetch()
        assert int(number) == turn + 1000


@on_chief()
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
    later = coordinator.schedule(lambda: 20)
    assert coordinator.schedule(lambda number: number + 1, (later,)).fetch() == 21
    large = np.arange(3_000_000.0)
    assert coordinator.schedule(np.sum, (large,)).fetch() == large.sum()
    np.testing.assert_array_equal(coordinator.schedule(lambda: np.arange(3_000_000.0)).fetch(), large)
    assert coordinator.done()


@up_to_ranks(8)
@on_chief()
def test_all_workers_work(coordinator):
    workers = len(coordinator.strategy.extended.worker_devices)

    def step():
        time.sleep(0.01)
        return os.getpid()

    pids = coordinator.fetch([coordinator.schedule(step) for _ in range(8 * workers)])
    assert len(set(pids)) == workers


@of_servers
@on_chief()
def test_schedule_does_not_wait_and_thousands_do_not_grow_without_bound(coordinator):
    began = time.monotonic()
    coordinator.schedule(time.sleep, (0.5,))
    assert time.monotonic() - began < 0.4
    assert not coordinator.done()
    count = variable(coordinator, 0)
    for _ in range(3000):
        coordinator.schedule(lambda: count.assign_add(1, read_value=False))
    coordinator.join()
    assert int(count) == 3000


@on_chief()
def test_what_is_scheduled_goes_on_while_the_chief_computes(coordinator):
    values = [coordinator.schedule(lambda: None) for _ in range(200)]
    time.sleep(1.0)
    assert all(value.status is RemoteValueStatus.READY for value in values)


def fail_at_3(number):
    if number == 3:
        time.sleep(0.5)  # until all are scheduled
        raise ValueError("three")
    time.sleep(0.02)
    return number


@of_servers
@on_chief()
def test_the_first_error_is_raised_once_and_the_rest_is_cancelled(coordinator):
    for collect in (coordinator.join, coordinator.done, lambda: coordinator.fetch([]), lambda: coordinator.schedule(max)):
        values = [coordinator.schedule(fail_at_3, (number,)) for number in range(3, 200)]
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


@of_servers
@on_chief()
def test_what_cannot_be_sent_is_refused(coordinator):
    lock = threading.Lock()

    with pytest.raises(TypeError, match="function .*<lambda> cannot be sent to another rank"):
        coordinator.schedule(lambda: lock)
    with pytest.raises(TypeError, match="an argument of function .* cannot be sent to another rank"):
        coordinator.schedule(print, (lock,))
    with pytest.raises(TypeError, match="got 3"):
        coordinator.schedule(3)
    value = coordinator.schedule(threading.Lock)
    with pytest.raises(TypeError, match="the result of function .* cannot be sent to another rank"):
        coordinator.join()
    assert value.status is RemoteValueStatus.ABORTED
    assert coordinator.schedule(abs, (-1,)).fetch() == 1


@up_to_ranks(8)
@on_chief()
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
        coordinator.schedule(lambda iterator: [next(iterator) for _ in range(61)], (iterator,))
        with pytest.raises(OutOfRangeError, match="the dataset of the worker has ended"):
            coordinator.join()
    with pytest.raises(NotImplementedError, match="are on the workers"):
        next(iterator)


@on_chief()
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


@on_chief()
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


@on_chief()
def test_a_dropped_iterator_stays_until_the_functions_that_use_it_have_run(coordinator):
    values = []
    for _ in range(3):
        iterator = iter(coordinator.create_per_worker_dataset(lambda: itertools.count()))
        values += [coordinator.schedule(lambda own: time.sleep(0.005) or next(own[0]), ([iterator],)) for _ in range(20)]
        del iterator
        gc.collect()
    assert len(coordinator.fetch(values)) == 60


@up_to_ranks(8)
@needs_ranks(4)
def test_no_function_waits_behind_a_long_one_while_a_worker_is_free():
    def program(coordinator):
        have_run = variable(coordinator, False)

        def wait():
            deadline = time.monotonic() + 20
            while not have_run.numpy() and time.monotonic() < deadline:
                time.sleep(0.01)
            return bool(have_run.numpy())

        long = coordinator.schedule(wait)
        short = [coordinator.schedule(abs, (-1,)) for _ in range(7)]
        assert [one.fetch() for one in short] == [1] * 7
        have_run.assign(True)
        assert long.fetch(), "short functions have waited for a long one"

    serve(1, program)


@pytest.mark.parametrize("is_captured", [False, True])
@on_chief()
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


@on_chief()
def test_scheduled_functions_run_in_the_scope_and_may_use_the_strategy(coordinator):
    strategy, total = coordinator.strategy, variable(coordinator, 0.0)

    def replica(batch):
        assert strategy.num_replicas_in_sync == 1
        total.assign_add(mpistrat.get_replica_context().all_reduce("sum", batch.sum()), read_value=False)
        return batch.max()

    def step(batch):
        assert mpistrat.get_strategy() is strategy
        assert mpistrat.in_cross_replica_context()
        return strategy.reduce("sum", strategy.run(replica, args=(batch,)), axis=None)

    assert coordinator.schedule(step, (np.arange(4.0),)).fetch() == 3
    assert float(total) == 6


@of_servers
@on_chief()
def test_the_chief_computes_nothing(coordinator):
    strategy = coordinator.strategy
    assert ClusterCoordinator(strategy) is coordinator
    assert coordinator.strategy is strategy
    assert (strategy.num_replicas_in_sync, strategy.cluster_resolver.task_type) == (1, "chief")
    for method in (
        "run",
        "reduce",
        "gather",
        "experimental_distribute_dataset",
        "distribute_datasets_from_function",
    ):
        with pytest.raises(NotImplementedError, match=rf"strategy.{method} was called on the chief"):
            getattr(strategy, method)(abs, 1)
    servers = tuple(f"/job:ps/task:{index}" for index in range(len(strategy.extended.server_bytes)))
    assert strategy.extended.parameter_devices == servers


def test_a_chief_that_raises_ends_the_servers(run):
    def program(coordinator):
        variable(coordinator, 1.0)
        coordinator.schedule(time.sleep, (0.1,))
        raise KeyError("of the chief")

    if start().rank == 0:
        with pytest.raises(KeyError, match="of the chief"):
            run(program)
    else:
        assert run(program) is None


def test_after_closing_nothing_is_scheduled_and_what_waited_is_cancelled(run):
    kept = {}

    def program(coordinator):
        kept["values"] = [coordinator.schedule(time.sleep, (0.02,)) for _ in range(200)]
        kept["variable"], kept["coordinator"] = variable(coordinator, 1.0), coordinator

    run(program)
    if start().rank == 0:
        assert kept["values"][0].status is RemoteValueStatus.READY
        with pytest.raises(CancelledError, match="was cancelled before it ran: the strategy was closed"):
            kept["values"][-1].fetch()
        with pytest.raises(RuntimeError, match="the strategy was closed"):
            kept["coordinator"].schedule(abs, (1,))
        with pytest.raises(RuntimeError, match="or the strategy that made the variable was closed"):
            kept["variable"].numpy()
        kept["coordinator"].join()
        kept["coordinator"].strategy.close()


def test_strategies_of_a_process_do_not_disturb_each_other():
    resolver = MPIClusterResolver(chief=1, ps=1)
    if resolver.task_type != "chief":
        servers = [mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id) for _ in range(2)]
        for server in servers:
            server.join()
        return
    coordinators = [ClusterCoordinator(ParameterServerStrategy(resolver)) for _ in range(2)]
    for value, coordinator in enumerate(coordinators):
        number = variable(coordinator, value)
        assert (int(number), coordinator.schedule(lambda number=number: int(number) + 1).fetch()) == (value, value + 1)
        coordinator.strategy.close()
        with pytest.raises(RuntimeError, match="or the strategy that made the variable was closed"):
            number.numpy()


def test_the_two_part_form_and_other_resolvers(monkeypatch):
    size, rank = start().size, start().rank
    jobs = {"chief": 1, "ps": 1, "worker": size - 2}
    tasks = [(job, index) for job, count in jobs.items() for index in range(count)][::-1]
    cluster = {job: [f"a:{8000 + 10 * len(job) + index}" for index in range(count)] for job, count in jobs.items()}
    job, index = tasks[rank]
    monkeypatch.setenv("TF_CONFIG", __import__("json").dumps({"cluster": cluster, "task": {"type": job, "index": index}}))
    resolver = TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        mpistrat.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
        return
    strategy = ParameterServerStrategy(resolver)
    number = variable(ClusterCoordinator(strategy), 2)
    assert ClusterCoordinator(strategy).schedule(lambda: int(number) + 1).fetch() == 3
    strategy.close()


def test_an_evaluator_stays_outside():
    if start().size < 4:
        pytest.skip("needs a rank more")
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
