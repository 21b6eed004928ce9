"""Variables on parameter servers: what they hold, how they are changed, and when they are freed."""

import copy
import gc
import itertools
import pickle
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.experimental import ShardedVariable, embedding_lookup
from mpistrat.experimental.partitioners import FixedShardsPartitioner, MinSizePartitioner
from mpistrat.launch.bootstrap import start
from mpistrat.parameter_server.variables import StoredVariable
from tests.launches import needs_ranks, up_to_ranks
from tests.processes import until
from tests.ranks.servers import on_chief, serve, variable

pytestmark = needs_ranks(4)


@on_chief(FixedShardsPartitioner(2))
def test_a_variable_reads_as_what_was_assigned_and_a_deep_copy_is_one_of_its_own(coordinator):
    dtypes = map(np.dtype, ("float64", "float32", "int8", "bool", "complex128", ml_dtypes.bfloat16))
    for kind, extents in itertools.product(dtypes, ((), (0,), (5,), (7, 3), (3, 0), (2000, 17))):
        first = np.arange(np.prod(extents)).reshape(extents).astype(kind)
        whole = variable(coordinator, first, name="whole")
        assert isinstance(whole, mpistrat.Variable)
        assert (whole.shape, whole.dtype, whole.name, whole.nbytes) == (extents, kind, "whole", first.nbytes)
        for _ in range(2):
            np.testing.assert_array_equal(whole.numpy(), first)
            np.testing.assert_array_equal(coordinator.schedule(lambda whole=whole: whole.numpy()).fetch(), first)
            first = (first + np.ones(extents, kind)).astype(kind)
            assert whole.assign(first) is whole
    first = np.arange(6.0).reshape(3, 2)

    table = variable(coordinator, first, name="table", trainable=False)
    copied, again = copy.deepcopy([table, table])
    copied.assign_add(np.ones((3, 2)))
    assert copied is again
    assert np.array_equal(table, first)
    assert np.array_equal(copied, first + 1)
    assert (type(copied), copied.name, copied.trainable) == (type(table), "table", False)
    assert (table.synchronization.name, table.aggregation.name, table.constraint) == ("ON_WRITE", "NONE", None)
    assert table.distribute_strategy is coordinator.strategy
    with pytest.raises(TypeError, match="^update changes a mpistrat.Variable of replicas; got ShardedVariable"):
        mpistrat.get_replica_context().update(table, np.negative)
    with pytest.raises(TypeError, match=r"correct: +variable.assign_add\(value\), or strategy.extended.update\(variable"):
        table[0] = 1
    coordinator.schedule(lambda: copy.deepcopy(table))
    with pytest.raises(RuntimeError, match="make variables on the chief"):
        coordinator.join()


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


@on_chief(FixedShardsPartitioner(3))
def test_scatter_does_what_it_does_to_an_ordinary_variable(coordinator):
    slices = mpistrat.IndexedSlices(np.array([[2.0, 5], [3, 7], [-1, 9], [4, 4]]), [6, 0, 6, 3])
    for method in ("add", "sub", "mul", "div", "min", "max", "update"):
        wanted = mpistrat.Variable(np.arange(1.0, 15).reshape(7, 2))
        table = variable(coordinator, wanted.numpy())
        assert getattr(table, f"scatter_{method}")(slices) is table
        np.testing.assert_array_equal(table, getattr(wanted, f"scatter_{method}")(slices), err_msg=method)
    with pytest.raises(InvalidArgumentError, match="index 7 is out of range"):
        table.scatter_add(mpistrat.IndexedSlices(np.ones((1, 2)), [7]))
    table.scatter_add(mpistrat.IndexedSlices(np.ones((0, 2)), np.zeros(0, int)))
    np.testing.assert_array_equal(table, wanted)


INDICES = [  # and how many rows each names
    *((3, 1), (-1, 1), (np.int64(4), 1)),
    *((slice(2, 9), 7), (slice(4, 4), 0), (slice(7, 2), 0)),
    *((slice(8, 1, -3), 10), (..., 10), (True, 10), ([1, 9, 1, -1], 10), (np.arange(10) > 6, 10), ((slice(1, 7), 1), 10)),
]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 10])
@on_chief()
def test_an_index_has_the_rows_sent_that_it_names_and_returns_what_numpy_does(coordinator, num_shards, monkeypatch):
    wanted, sent = np.arange(60).reshape(10, 3, 2), []
    table, client = variable(coordinator, wanted), coordinator.strategy.client

    def counted(ask, parts):
        sent.extend(len(target) for *_, target in parts)
        ask(parts)

    monkeypatch.setattr(client, "read", partial(counted, client.read))
    for index, num_rows in INDICES:
        sent.clear()
        np.testing.assert_array_equal(table[index], wanted[index], err_msg=str(index))
        assert sum(sent) == num_rows, index
    for index in (10, -11, [3, 10]):
        with pytest.raises(IndexError):
            table[index]
    np.testing.assert_array_equal(table + 1, wanted + 1)
    np.testing.assert_array_equal(np.sum(table, axis=0), wanted.sum(axis=0))
    assert len(table) == 10


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@on_chief()
def test_rows_are_read_by_their_ids(coordinator, num_shards):
    wanted = np.arange(30.0).reshape(10, 3)
    table = variable(coordinator, wanted)
    for ids in ([4], [9, 0, 9, 5], [[1, 2], [8, 1]], np.zeros(0, int), 7):
        np.testing.assert_array_equal(table.sparse_read(ids), wanted[ids])
        for params in table, wanted:
            np.testing.assert_array_equal(embedding_lookup(params, ids), wanted[ids])
    assert variable(coordinator, wanted[:, 0]).sparse_read(7) == 21
    for indices in ([[9, 2], [0, 0], [9, 2]], [[3]], [4, 1], [], np.zeros((0, 2), int), np.zeros((2, 0), int)):
        np.testing.assert_array_equal(table.gather_nd(indices), mpistrat.Variable(wanted).gather_nd(indices), strict=True)
    assert table.is_initialized()
    with pytest.raises(InvalidArgumentError, match="along axis 1 must be 0 to 2; got 3 to 3"):
        table.gather_nd([[0, 3]])
    for params in table, wanted:
        with pytest.raises(InvalidArgumentError, match="must be 0 to 9; got -1 to 3"):
            embedding_lookup(params, [3, -1])
    large = variable(coordinator, np.arange(100_000.0).reshape(10_000, 10))
    for ids in np.arange(0, 10_000, 20), np.arange(0, 10_000, 2):  # those of each server are sent with the request, or after it
        np.testing.assert_array_equal(large.sparse_read(ids), large.numpy()[ids])


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


@on_chief(lambda shape, dtype: [2, 1])
def test_initial_values_of_shards_are_made_one_by_one(coordinator):
    asked = []

    def of_shard(shard_info):
        asked.append(tuple(shard_info))
        return np.full(shard_info.shape, shard_info.offset[0])

    def of_partition(shape, dtype, partition_shape=None, partition_offset=None):
        asked.append((partition_shape, partition_offset))
        return np.full(partition_shape or shape, (partition_offset or [0])[0], dtype)

    for rows in of_shard, partial(of_partition, (5, 2), np.int64):
        table = variable(coordinator, rows, shape=(5, 2), dtype=np.int64)
        np.testing.assert_array_equal(table[:, 0], [0, 0, 0, 3, 3])
    assert asked == 2 * [((3, 2), (0, 0)), ((2, 2), (3, 0))]
    np.testing.assert_array_equal(variable(coordinator, lambda: [[1.0], [2.0]]), [[1], [2]])
    in_c = partial(max, [[1.0], [2.0]], [[3.0], [4.0]])  # tells no parameters, as `np.zeros` before NumPy 2.4
    np.testing.assert_array_equal(variable(coordinator, in_c, shape=(2, 1)), [[3], [4]])
    with pytest.raises(InvalidArgumentError, match=r"must have shape \(3, 2\); got an initial value of shape \(3, 1\)"):
        variable(coordinator, lambda shard_info: np.zeros((3, 1)), shape=(5, 2))


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


@on_chief(num_servers=[1, 2])
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


@on_chief(num_servers=[1])
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


def test_bytes_are_even_over_servers():
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


@on_chief(MinSizePartitioner(64, max_shards=2))
def test_variables_may_be_placed_together(coordinator):
    first, second = (variable(coordinator, np.zeros(4)) for _ in range(2))
    assert (first.server, second.server) == (0, 1)
    extended = coordinator.strategy.extended
    with extended.colocate_vars_with(second):
        beside = [variable(coordinator, np.zeros(100)) for _ in range(3)]
    assert [one.server for one in beside] == [1, 1, 1]
    assert all(type(one) is not ShardedVariable for one in beside)
    assert extended.variable_created_in_scope(first)
    with pytest.raises(InvalidArgumentError, match="takes a variable of this strategy; got 3"), extended.colocate_vars_with(3):
        pass


def momentum(variable, gradient, rate, decay=0.9):
    velocity = variable.slot("velocity")
    velocity[...] = decay * velocity + gradient
    variable.value[...] -= rate * velocity
    return len(gradient)


@on_chief(FixedShardsPartitioner(2), num_servers=[1, 2])
def test_a_function_updates_a_variable_where_it_lives(coordinator):
    gradient = np.arange(10.0).reshape(5, 2)

    table, update = variable(coordinator, np.ones((5, 2))), coordinator.strategy.extended.update
    wanted, velocity = np.ones((5, 2)), np.zeros((5, 2))
    for rate in (0.5, 0.1):
        assert update(table, momentum, (gradient,), {"rate": rate}) is None
        velocity = 0.9 * velocity + gradient
        wanted -= rate * velocity
    np.testing.assert_allclose(table, wanted)
    for _ in range(20):
        coordinator.schedule(lambda: mpistrat.get_strategy().extended.update(table, StoredVariable.assign_add, (gradient,)))
    coordinator.join()
    np.testing.assert_allclose(table, wanted + 20 * gradient)
    assert update(table, momentum, (gradient, 0.0), group=False) == [3, 2]
    update(table, lambda var, rows: var.scatter_update(rows), (mpistrat.IndexedSlices(np.zeros((2, 2)), [4, 0]),))
    assert (table[0] == 0).all()
    assert (table[4] == 0).all()
    slices = mpistrat.IndexedSlices(np.ones((2, 2)), [4, 0], (5, 2))
    update(table, lambda var, rows: var.assign(rows.to_dense()), (slices,))
    assert np.array_equal(table, slices.to_dense())
    with pytest.raises(mpistrat.errors.InvalidArgumentError, match="index 5 is out of range"):
        update(table, lambda var, rows: var.scatter_add(rows), (mpistrat.IndexedSlices(np.ones((2, 2)), [0, 5]),))
    assert np.array_equal(table, slices.to_dense())
    with pytest.raises(ZeroDivisionError) as caught:
        update(table, lambda var: 1 // 0)
    assert "ps 0 (rank 1" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match="the result of an update of .* cannot be sent"):
        update(table, lambda var: threading.Lock(), group=False)
    with pytest.raises(TypeError, match="changes variables on servers"):
        update(3, momentum)


@up_to_ranks(8)
@on_chief(num_servers=[1, 2])
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
