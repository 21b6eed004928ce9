"""Distributed datasets: what each replica gets under each policy and option, and how all come to the end."""

import gc
import itertools
import re
import threading
import time

import numpy as np
import pytest

import mpistrat
from mpistrat import SHARD_HINT, AutoShardPolicy, InputContext, InputOptions, InputReplicationMode
from mpistrat.context.stack import default_mode
from mpistrat.context.values import PerReplica, select_replica
from mpistrat.errors import AgreementError, InvalidArgumentError, OutOfRangeError
from mpistrat.inputs.distribute import distribute_dataset, distribute_from_function
from mpistrat.inputs.input_options import ValueContext, read_options
from mpistrat.inputs.sources import ArrayDataset, FileDataset, MapDataset
from mpistrat.structures import flatten
from tests.processes import python, until
from tests.unit.replicas import on_replicas

OFF, AUTO, FILE, DATA, HINT = AutoShardPolicy
ONE = mpistrat.OneDeviceStrategy


def steps_of(num_replicas, distribute):
    """Return, for each step, what each replica got of the dataset that is made for its strategy."""

    def program(strategy):
        elements = [*distribute(strategy)]
        assert all(isinstance(leaf, PerReplica) for leaf in flatten(elements)[0]) or num_replicas == 1, "even at the end"
        return select_replica(elements)

    return list(zip(*on_replicas(num_replicas, program), strict=True))


def handed_out(num_replicas, make_dataset, policy=AUTO):
    options = InputOptions(auto_shard_policy=policy)
    return steps_of(num_replicas, lambda strategy: distribute_dataset(strategy, make_dataset(), options))


def made_by(num_replicas, make):
    """Return the steps of datasets that each replica makes of its number."""
    return steps_of(num_replicas, lambda s: distribute_from_function(s, lambda context: make(context.input_pipeline_id)))


def rows_of(steps):
    return [[share.tolist() for share in step] for step in steps]


def batches_of(rows, batch_size):
    return [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]


SOURCES = {
    "arrays": lambda rows, size=4, **options: ArrayDataset(rows, size, **options),
    "samples": lambda rows, size=4, **options: MapDataset(list(rows), size, **options),
    "list": lambda rows, size=4: batches_of(rows, size),
    "generator": lambda rows, size=4: iter(batches_of(rows, size)),
    "files": lambda rows, size=4: FileDataset(["all"], lambda _: rows, size),
}


@pytest.mark.parametrize("source", SOURCES)
def test_without_sharding_each_replica_sees_all_rows(source):
    steps = rows_of(handed_out(2, lambda: SOURCES[source](np.arange(6)), OFF))
    # the size of a batch of an iterable is not known before it is there
    rest = [[[4]] * 2, [[5]] * 2] if source in ("list", "generator") else [[[4, 5]] * 2]
    assert steps == [[[0, 1]] * 2, [[2, 3]] * 2, *rest]
    steps = rows_of(handed_out(3, lambda: SOURCES[source](np.arange(8)), OFF))
    assert [[row for step in steps for row in step[replica]] for replica in range(3)] == [list(range(8))] * 3
    assert [sum(map(len, step)) for step in steps] == [4] * 6


def test_replicas_read_files_of_their_own():
    contents = {"a": np.arange(4), "b": np.arange(100, 106), "c": np.arange(200, 202), "d": np.arange(300, 301)}
    for policy in (AUTO, FILE):
        steps = rows_of(handed_out(2, lambda: FileDataset(list(contents), contents.__getitem__, 4), policy))
        assert steps == [[[0, 1], [100, 101]], [[2, 3], [102, 103]], [[200, 201], [104, 105]], [[], [300]]]
    # by the hint, which is replaced by the numbers of the pipeline, rows of their own
    steps = rows_of(handed_out(2, lambda: ArrayDataset(np.arange(12), 4).shard(SHARD_HINT, SHARD_HINT), HINT))
    assert steps == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8, 10], [9, 11]]]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("policy", "source"),
    [
        *((policy, source) for policy in (AUTO, DATA) for source in SOURCES),
        *((HINT, source) for source in ("arrays", "samples", "files")),
        (FILE, "files"),
    ],
)
def test_an_epoch_has_every_row_once_at_any_number_of_replicas(num_replicas, policy, source):
    files = dict(zip("abcdefgh", np.array_split(np.arange(37), 8), strict=True))
    shuffled = {"shuffle": True} if source in ("arrays", "samples") else {}

    def make():
        if source == "files":
            return FileDataset(list(files), files.__getitem__, 5, shuffle=True)
        return SOURCES[source](np.arange(37), 5, **shuffled)

    hinted = (lambda: make().shard(SHARD_HINT, SHARD_HINT)) if policy is HINT else make
    steps = handed_out(num_replicas, hinted, policy)
    assert sorted(row for step in steps for share in step for row in share) == list(range(37))
    if policy is DATA:
        assert [np.concatenate(step).tolist() for step in steps] == [batch.tolist() for batch in make()]


@pytest.mark.parametrize(
    ("dataset", "policy", "message"),
    [
        (FileDataset(["a", "b"], np.load, 2), AUTO, "2 files .* by 3 input pipelines.*policy=AutoShardPolicy.DATA"),
        (FileDataset(["a", "b"], np.load, 2), FILE, "2 files cannot be shared by 3 input pipelines"),
        (ArrayDataset(np.arange(3), 2), FILE, r"AutoShardPolicy.FILE .*ArrayDataset\(3 rows, .*has none; use .*DATA"),
        (ArrayDataset(np.arange(3), 2), HINT, r"(?s)of SHARD_HINT, and ArrayDataset\(3 .*correct:.*\.shard\(SHARD_HINT"),
        (ArrayDataset(np.arange(3), 2).shard(-1, -1), DATA, "by SHARD_HINT waits for AutoShardPolicy.HINT; got DATA"),
        ([np.arange(3)], HINT, r"IterableDataset\(list of 1 batches\) was not sharded by it"),
    ],
)
def test_policies_that_do_not_fit_are_refused(dataset, policy, message):
    def program(strategy):
        with pytest.raises(InvalidArgumentError, match=message):
            distribute_dataset(strategy, dataset, InputOptions(auto_shard_policy=policy))

    on_replicas(3, program)


def test_what_the_function_makes_is_neither_shared_nor_cut():
    assert rows_of(made_by(2, lambda pipeline: ArrayDataset(np.arange(6), 3).shard(2, pipeline))) == [[[0, 2, 4], [1, 3, 5]]]
    assert rows_of(made_by(2, lambda pipeline: [np.arange(5), np.arange(1)])) == [[[0, 1, 2, 3, 4]] * 2, [[0]] * 2]


@pytest.mark.parametrize(
    ("make", "num_exchanges"),
    [
        (lambda strategy: distribute_dataset(strategy, ArrayDataset(np.arange(7), 2)), 0),
        (lambda strategy: distribute_from_function(strategy, lambda c: [np.zeros(1)] * (5 - c.input_pipeline_id)), 6),
    ],
    ids=["shared batches", "batches of its own"],
)
def test_replicas_exchange_only_what_they_do_not_know(make, num_exchanges):
    def program(strategy):
        distributed, communicator = make(strategy), strategy.extended.communicator
        before = communicator.num_collectives
        list(distributed)
        return communicator.num_collectives - before

    assert on_replicas(2, program) == [num_exchanges] * 2


@pytest.mark.parametrize("seen", [0, 1], ids=["by the others", "by the replica"])
def test_empty_batches_are_of_the_kind_that_was_seen(seen):
    torch = pytest.importorskip("torch")
    [*_, (_, empty)] = made_by(2, lambda pipeline: [torch.ones(2, 3)] * (seen + 1 - pipeline))
    assert (type(empty), tuple(empty.shape), empty.dtype) == (torch.Tensor, (0, 3), torch.float32)


def test_the_default_strategy_gets_what_there_is():
    default, dataset = default_mode().strategy, object()
    assert distribute_dataset(default, dataset) is dataset
    assert distribute_from_function(default, lambda context: (dataset, context)) == (dataset, InputContext())
    assert mpistrat.get_strategy().experimental_distribute_dataset(dataset) is dataset


@pytest.mark.parametrize(
    ("dataset_fn", "error", "message"),
    [
        ([np.zeros(2)], TypeError, r"dataset_fn must be a function of an InputContext that returns a dataset; got \[array"),
        (lambda context: None, TypeError, "a dataset is a mpistrat.ArrayDataset, .*; got NoneType"),
        (lambda context: np.zeros(3), TypeError, "got ndarray. Arrays are cut into batches"),
        (lambda context: ArrayDataset(np.arange(3), 2).shard(SHARD_HINT, SHARD_HINT), InvalidArgumentError, "waits for .*HINT"),
    ],
)
def test_functions_that_make_no_dataset_are_refused(dataset_fn, error, message):
    with pytest.raises(error, match=message):
        distribute_from_function(ONE(), dataset_fn)


@pytest.mark.parametrize("distribute", [distribute_dataset, distribute_from_function])
@pytest.mark.parametrize("strategy", [ONE(), default_mode().strategy])
def test_options_that_no_strategy_here_has_are_refused(distribute, strategy):
    options = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)
    make = lambda context: [np.zeros(2)]  # noqa: E731
    with pytest.raises(NotImplementedError, match="PER_REPLICA is for MirroredStrategy.distribute_datasets_from_function only"):
        distribute(strategy, make, options)
    with pytest.raises(TypeError, match="options must be mpistrat.InputOptions or None; got str"):
        distribute(strategy, make, "fast")


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("method", ["get_next", "get_next_as_optional", "__next__"])
def test_elements_are_taken_outside_run(num_replicas, method):
    def program(strategy):
        iterator = iter(distribute_dataset(strategy, ArrayDataset(np.arange(4), 2)))
        message = r"(?s)next\(iterator\) must be called outside strategy.run.*correct: .*args=\(next\(iterator\),\)"
        with pytest.raises(ValueError, match=message):
            strategy.run(lambda: getattr(iterator, method)())
        with pytest.raises(RuntimeError, match="two strategies cannot be mixed"), ONE().scope():
            getattr(iterator, method)()
        merged = strategy.run(lambda: mpistrat.get_replica_context().merge_call(lambda _: next(iterator)))
        return select_replica(merged).tolist(), [select_replica(element).tolist() for element in iterator]

    assert on_replicas(num_replicas, program)[0] == {1: ([0, 1], [[2, 3]]), 2: ([0], [[2]])}[num_replicas]


def test_the_end_is_out_of_range_and_stays():
    iterator = iter(distribute_dataset(ONE(), ArrayDataset(np.arange(5), 2)))
    found = iterator.get_next_as_optional()
    assert (found.has_value(), found.get_value().tolist(), repr(found)) == (True, [0, 1], "OptionalElement(array([0, 1]))")
    assert [iterator.get_next().tolist(), next(iterator).tolist()] == [[2, 3], [4]]
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="the data has ended, after 3 elements"):
            iterator.get_next()
    nothing = iterator.get_next_as_optional()
    assert (nothing.has_value(), repr(nothing)) == (False, "OptionalElement()")
    with pytest.raises(InvalidArgumentError, match=r"because the data has ended; call has_value\(\) first"):
        nothing.get_value()
    assert list(iterator) == []


SPEC = {"x": mpistrat.ArraySpec((None, 3), np.dtype(np.float32)), "y": mpistrat.ArraySpec((None,), np.dtype(np.int64))}


@pytest.mark.parametrize("kind", [ArrayDataset, "generator"])
def test_element_specs_are_known_before_the_first_element(kind):
    data = {"x": np.zeros((6, 3), np.float32), "y": np.arange(6)}
    source = ArrayDataset(data, 4) if kind is ArrayDataset else (batch for batch in ArrayDataset(data, 4))
    dataset = distribute_dataset(ONE(), source)
    assert dataset.element_spec == SPEC
    iterator = iter(dataset)
    assert iterator.element_spec == SPEC
    assert [element["y"].tolist() for element in iterator] == [[0, 1, 2, 3], [4, 5]]
    assert iterator.element_spec == SPEC


@pytest.mark.parametrize(
    ("dataset", "policy", "length"),
    [
        *((ArrayDataset(np.zeros(rows), 4), AUTO, length) for rows, length in ((0, 0), (3, 1), (8, 2), (10, 3))),
        *((ArrayDataset(np.zeros(rows), 4, drop_remainder=True), AUTO, rows // 4) for rows in (3, 8, 10)),
        ([np.arange(4)] * 2, AUTO, 2),
        (MapDataset([1, 2, 3], 2), DATA, 2),
    ],
)
def test_the_length_is_the_number_of_elements(dataset, policy, length):
    def program(strategy):
        distributed = distribute_dataset(strategy, dataset, InputOptions(auto_shard_policy=policy))
        assert repr(distributed).endswith(f", replica={strategy.rank}(2))")
        return len(distributed), len(list(distributed))

    assert len(dataset) == len(list(dataset)) == length
    assert on_replicas(2, program) == [(length, length)] * 2
    alone = distribute_dataset(ONE(), ArrayDataset(np.arange(3), 2))
    assert repr(alone) == "DistributedDataset(ArrayDataset(3 rows, 2 batches of 2), replica=0(1))"


def test_a_length_that_only_iterating_tells_is_not_guessed():
    files = FileDataset(["all"], lambda _: np.arange(3), 2)
    for distributed in (
        distribute_dataset(ONE(), files),
        distribute_dataset(ONE(), iter([np.arange(2)])),
        distribute_from_function(ONE(), lambda context: [np.arange(2)]),
        distribute_dataset(ONE(), [np.arange(2)], InputOptions(auto_shard_policy=OFF)),
    ):
        with pytest.raises(TypeError, match="is known only after iterating over it"):
            len(distributed)
        assert len(list(distributed)) > 0


@pytest.mark.parametrize("buffer_size", [0, 1])
@pytest.mark.parametrize("error", [OSError, SystemExit])
@pytest.mark.parametrize("num_batches", [0, 1])
def test_an_error_of_the_source_is_raised_once_and_ends_the_iteration(buffer_size, error, num_batches):
    def failing(self):
        yield from [np.arange(2)] * num_batches
        raise error("the disk is gone")

    sized = type("Sized", (), {"__iter__": failing, "__len__": lambda self: 3})()
    source = failing(None) if error is OSError else sized
    iterator = iter(distribute_dataset(ONE(), source, InputOptions(experimental_per_replica_buffer_size=buffer_size)))
    if num_batches:
        next(iterator)
    elif error is OSError:  # which is not the end of the data for element_spec
        for _ in range(2):
            with pytest.raises(error, match="the disk is gone"):
                iterator.element_spec  # noqa: B018 - it is made when it is asked for
    with pytest.raises(error, match="the disk is gone") as caught:
        next(iterator)
    assert any(entry.name == "failing" for entry in caught.traceback)
    assert list(iterator) == [], "no batches of no rows instead of those that were not read"


@pytest.mark.parametrize("how", ["close", "forget"])
def test_the_thread_ends_with_the_iterator(how):
    before = threading.active_count()
    iterator = iter(distribute_dataset(ONE(), ArrayDataset(np.arange(100), 2)))
    next(iterator)
    assert threading.active_count() == before + 1
    if how == "close":
        iterator.close()
        assert list(iterator) == []
    else:
        del iterator
        gc.collect()
    assert until(lambda: threading.active_count() == before, 30)


def test_a_program_does_not_end_while_a_thread_reads():
    program = """
import threading, time
from mpistrat.inputs.prefetch import prefetched

reads = threading.Event()

def source():
    reads.set()
    time.sleep(0.3)
    print("has read", flush=True)
    yield 1

iterator = prefetched(source(), 1)
reads.wait()
"""
    assert python(program).stdout == "has read\n"


def test_an_interrupt_of_the_program_leaves_no_thread_waiting():
    program = """
import faulthandler, signal, time
from mpistrat.inputs.prefetch import prefetched

faulthandler.dump_traceback_later(20, exit=True)
is_reading, deadline, interrupts = False, time.monotonic() + 1, 0

def interrupt(*_):
    global is_reading
    if is_reading:
        is_reading = False
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-4)
while time.monotonic() < deadline:
    elements = prefetched(iter(range(10**9)), 4)
    try:
        is_reading = True
        for _ in elements:
            pass
    except KeyboardInterrupt:
        interrupts += 1
    elements.close()
print(interrupts > 100)
"""
    done = python(program)
    assert done.stdout == "True\n", done.stderr


def test_a_forked_child_is_told_that_nobody_reads_ahead_there():
    program = """
import os, signal
from mpistrat.inputs.prefetch import prefetched

iterator = prefetched(iter(range(5)), 1)
next(iterator)
if os.fork() == 0:
    signal.alarm(20)  # it would wait for ever
    try:
        next(iterator)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
print(next(iterator))
"""
    out = python(program, options=("-W", "ignore:This process:DeprecationWarning")).stdout
    assert re.fullmatch(r"UnavailableError process \d+ was forked from the one that reads .*\n1\n", out)


@pytest.mark.parametrize("buffer_size", [0, 1, 3])
def test_so_many_elements_are_made_ahead_and_no_more(buffer_size):
    makers = []

    def source():
        for number in range(100):
            makers.append(threading.current_thread())
            yield np.full(1, number)

    iterator = iter(distribute_dataset(ONE(), source(), InputOptions(experimental_per_replica_buffer_size=buffer_size)))
    for taken in range(3):
        assert until(lambda: len(makers) == buffer_size + taken, 30)  # noqa: B023
        time.sleep(0.02)  # by now one too many would be made
        assert len(makers) == buffer_size + taken
        assert next(iterator).tolist() == [taken]
    assert (threading.current_thread() in makers) is (buffer_size == 0)
    iterator.close()


@pytest.mark.parametrize("kind", [np.ndarray, "tensor"])
def test_a_source_may_use_its_memory_again(kind):
    buffer = np.zeros(4) if kind is np.ndarray else pytest.importorskip("torch").zeros(4)

    def source():
        for number in range(5):
            buffer[:] = number
            yield buffer

    elements = list(distribute_dataset(ONE(), source()))
    assert [element.tolist() for element in elements] == [[number] * 4 for number in range(5)]
    assert {type(element) for element in elements} == {type(buffer)}


@pytest.mark.parametrize("policy", [DATA, OFF])
@pytest.mark.parametrize("source", SOURCES)
def test_a_replica_may_write_to_its_elements(source, policy):
    data = np.arange(6)
    for element in distribute_dataset(ONE(), SOURCES[source](data), InputOptions(auto_shard_policy=policy)):
        element += 100
    assert data.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_replica_that_left_the_loop_alone_is_noticed():
    def program(strategy):
        batches = distribute_from_function(strategy, lambda context: Endless())
        first = iter(batches)
        next(first)
        again = first if strategy.extended.communicator.rank else iter(batches)
        with pytest.raises(AgreementError, match=r"\(number 0 of epoch 1\).*\(number 1 of epoch 0\)"):
            next(again)
        first.close()
        return list(again)

    assert on_replicas(2, program) == [[], []]


class Endless:
    def __iter__(self):
        return itertools.repeat(np.zeros(2))


def test_values_from_a_function_are_per_replica_values():
    def program(strategy):
        value = strategy.experimental_distribute_values_from_function(
            lambda context: {"id": context.replica_id_in_sync_group, "of": [context.num_replicas_in_sync]}
        )
        assert isinstance(value["id"], PerReplica)
        return strategy.experimental_local_results(value)

    assert on_replicas(2, program) == [({"id": 0, "of": [2]},), ({"id": 1, "of": [2]},)]
    value = ONE().experimental_distribute_values_from_function(lambda context: [context])
    assert value == [ValueContext(0, 1)]


PER_REPLICA = InputReplicationMode.PER_REPLICA


def test_defaults_and_per_replica_batch_size():
    options = InputOptions()
    assert options == InputOptions(None, InputReplicationMode.PER_WORKER, False, 1, AutoShardPolicy.AUTO) == read_options(None)
    assert read_options(options) is options
    assert InputOptions(False, PER_REPLICA, True).experimental_place_dataset_on_device
    assert {policy.name: policy.value for policy in AutoShardPolicy} == {"OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3}
    assert [mode.name for mode in InputReplicationMode] == ["PER_WORKER", "PER_REPLICA"]
    assert repr(InputContext()) == "InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)"
    assert repr(ValueContext()) == "ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)"
    assert InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(16) == 4
    with pytest.raises(InvalidArgumentError, match="global_batch_size 10 is not divisible by 4 replicas; 8 and 12 are"):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(10)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((None, InputReplicationMode.PER_WORKER, True), InvalidArgumentError, "True needs .*PER_REPLICA; got PER_WORKER"),
        ((None, PER_REPLICA, True), InvalidArgumentError, "needs .*_fetch_to_device=False; got None, and None means True"),
        ((True, PER_REPLICA, True), InvalidArgumentError, "needs experimental_fetch_to_device=False; got True"),
        ({"experimental_per_replica_buffer_size": -1}, InvalidArgumentError, "buffer_size must be at least 0; got -1"),
        ({"experimental_per_replica_buffer_size": 1.5}, TypeError, "buffer_size must be an int; got 1.5"),
        ({"experimental_fetch_to_device": "no"}, TypeError, "experimental_fetch_to_device must be bool or None; got 'no'"),
        ({"experimental_replication_mode": "PER_REPLICA"}, TypeError, "must be InputReplicationMode; got 'PER_REPLICA'"),
        ({"experimental_place_dataset_on_device": None}, TypeError, "experimental_place_dataset_on_device must be bool; got N"),
        ({"auto_shard_policy": "DATA"}, TypeError, "auto_shard_policy must be AutoShardPolicy; got 'DATA'"),
        (lambda: InputContext(num_replicas_in_sync=0), InvalidArgumentError, "num_replicas_in_sync must be at least 1; got 0"),
        (lambda: InputContext(num_input_pipelines=0), InvalidArgumentError, "num_input_pipelines must be at least 1; got 0"),
        (lambda: InputContext(2, 2), InvalidArgumentError, "input_pipeline_id must be one of 0 to 1; got 2"),
        (lambda: InputContext(input_pipeline_id=-1), InvalidArgumentError, "input_pipeline_id must be one of 0 to 0; got -1"),
        (lambda: ValueContext(num_replicas_in_sync=0), InvalidArgumentError, "num_replicas_in_sync must be at least 1; got 0"),
        (lambda: ValueContext(3, 3), InvalidArgumentError, "replica_id_in_sync_group must be one of 0 to 2; got 3"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        given() if callable(given) else InputOptions(**given) if isinstance(given, dict) else InputOptions(*given)
