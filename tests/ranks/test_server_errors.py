"""Parameter servers: what fails on a server, comes too late or is given up is told to whoever has asked for it."""

import gc
import sys
import weakref
from contextlib import contextmanager, nullcontext, suppress
from unittest.mock import Mock

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import CancelledError, CollectiveError, DeadlineExceededError
from mpistrat.experimental.partitioners import FixedShardsPartitioner
from mpistrat.launch.bootstrap import start
from mpistrat.parameter_server.client import current_client
from mpistrat.parameter_server.functions import dumps
from mpistrat.parameter_server.messages import REQUEST, Run
from mpistrat.parameter_server.variables import StoredVariable
from tests.interrupts import interrupted
from tests.launches import needs_ranks
from tests.processes import until
from tests.ranks.servers import on_chief, serve, variable

pytestmark = needs_ranks(4)


def test_an_error_in_a_change_is_raised_where_that_was_asked_for():
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

    with pytest.raises(FloatingPointError, match="overflow") if start().rank == 0 else nullcontext():
        serve(2, program)


class Planted:
    """Stands in for an array, or is called for one: any use raises an error."""

    def __call__(self, *given):
        raise MemoryError("planted " * 4000)

    def __getattr__(self, name):
        raise MemoryError("planted " * 4000)


@on_chief()
def test_an_error_in_an_answer_is_raised_where_that_was_asked_for_also_one_that_would_end_a_task(coordinator):
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
    number = variable(coordinator, 1.0)
    with pytest.raises(RuntimeError, match=r"worker . \(rank .* wanted to end it: SystemExit\(0\)"):
        coordinator.schedule(sys.exit, (0,)).fetch()
    with pytest.raises(RuntimeError, match=r"ps . \(rank .* wanted to end it: SystemExit"):
        coordinator.strategy.extended.update(number, lambda _: sys.exit())
    assert number.numpy() == 1


@pytest.mark.parametrize("rows", [10, 100_000])
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


@on_chief()
def test_a_variable_that_no_server_can_keep_is_not_made(coordinator):
    def plant(stored, made):
        sys.modules["mpistrat.parameter_server.server"].StoredVariable = made

    first, extended = variable(coordinator, 1.0), coordinator.strategy.extended
    with extended.colocate_vars_with(first):
        extended.update(first, lambda stored: plant(stored, Planted()))  # made there: pickle would ask it for its state
        with pytest.raises(MemoryError, match="planted"):
            variable(coordinator, 2.0)
        extended.update(first, plant, (StoredVariable,))
        assert (sum(extended.server_bytes), variable(coordinator, 3.0).numpy()) == (8, 3)


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


@pytest.mark.parametrize("cause", [DeadlineExceededError, KeyboardInterrupt])
@on_chief()
def test_after_a_call_that_was_given_up_no_other_is_made(coordinator, tmp_path, monkeypatch, cause):
    number = variable(coordinator, 1.0, name="number")
    channel = coordinator.strategy.client.channel
    assert coordinator.schedule(number.numpy).fetch() == 1
    with monkeypatch.context() as patch, deadline(number):
        if cause is KeyboardInterrupt:
            patch.setattr(channel, "wait_until", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(cause):
            update_held(number, tmp_path)
    (tmp_path / "let go").touch()
    said = rf"chief 0 \(rank 0 on .*\({cause.__name__}\).* answer of ps 0 \(rank 1 on .*: call of held of number"
    for call in (number.numpy, lambda: number.assign(2.0), lambda: update_held(number, tmp_path)):
        with pytest.raises(CollectiveError, match=said):
            call()
    assert coordinator.schedule(number.numpy).fetch() == 1, "the workers go on"


@on_chief()
def test_a_function_that_misses_a_deadline_raises_it(coordinator, tmp_path):
    number = variable(coordinator, 1.0)
    with pytest.raises(DeadlineExceededError, match=r"worker . \(.*: call of held of"):
        coordinator.schedule(impatient, (number, tmp_path)).fetch()
    (tmp_path / "let go").touch()
    assert number.numpy() == 2


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt of a finalizer
@on_chief()
def test_interrupts_lose_no_function(coordinator):
    assert coordinator.schedule(abs, (-1,)).fetch() == 1  # imports what it needs

    def schedule():
        assert coordinator.schedule(abs, (-1,)).fetch() == 1

    assert interrupted(schedule, 2.0, 1e-3, caught=CancelledError) > 100
    assert until(coordinator._dispatcher.is_idle, 10.0), "a function was lost"
    with suppress(CancelledError):
        coordinator.join()
    assert coordinator.schedule(abs, (-1,)).fetch() == 1


@on_chief()
def test_a_call_within_another_one_or_of_a_handler_within_itself_is_refused(coordinator, monkeypatch):
    number, channel = variable(coordinator, 1.0), coordinator.strategy.client.channel
    began = channel.wait_until

    def within(*arguments):
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="this thread waits for an answer of ps 0 .*: read of Variable: signal handlers"):
            number.numpy()
        began(*arguments)

    monkeypatch.setattr(channel, "wait_until", within)
    monkeypatch.setattr(coordinator.strategy.client, "_has_ended", lambda *_: False)
    assert number.numpy() == 1
    value, dispatcher = coordinator.schedule(abs, (-1,)), coordinator.strategy.dispatcher
    went_on, told = dispatcher._take_and_send, []

    def interrupted():
        with pytest.raises(RuntimeError, match="signal handlers must not use the coordinator meanwhile"):
            coordinator.done()
        told.append(True)
        went_on()

    monkeypatch.setattr(dispatcher, "_take_and_send", interrupted)
    assert value.fetch() == 1
    assert told


@on_chief()
def test_an_answer_to_another_request_is_refused(coordinator):
    number = variable(coordinator, 1.0)
    client = coordinator.strategy.client
    client.channel.send([], 1, REQUEST, Run(777, 0, number._refs[0].number, True), dumps(((), {}), "arguments"))
    with pytest.raises(CollectiveError, match="what came answers request 777"):
        coordinator.strategy.extended.update(number, abs)
    with pytest.raises(CollectiveError, match="no call can reach the servers any more"):
        number.numpy()
