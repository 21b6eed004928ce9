"""Strategies over real collectives, what explain() says of them, and a model that trains to the same weights everywhere."""

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

import mpistrat
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.errors import AgreementError, InvalidArgumentError, UnsupportedDtypeError
from mpistrat.tools import train_digits
from mpistrat.tools.train_digits import train
from mpistrat.transports.mpi_world import MpiAllReduce
from mpistrat.transports.pairwise import _Ordered
from mpistrat.transports.ring import BoundRing
from mpistrat.transports.shared_memory import Exchange
from mpistrat.transports.small import SmallAllReduce
from tests.launches import needs_ranks, on_ranks
from tests.ranks.cases import case

pytestmark = on_ranks(1, 3)


def test_replicas_are_ranks(comm, strategy, world):
    context = strategy.run(mpistrat.get_replica_context)
    if comm.size > 1:
        context = context.values[0]
    assert context.replica_id_in_sync_group == comm.rank
    assert strategy.num_replicas_in_sync == context.num_replicas_in_sync == comm.size
    assert strategy.extended.should_checkpoint == (comm.rank == 0)
    assert strategy.extended.communicator.world.shape == world.shape
    place = world.place(comm.rank)
    assert (strategy.rank, strategy.local_rank, strategy.node_rank) == (comm.rank, place.local_rank, place.node.index)
    assert sum(comm.allgather(strategy.is_chief)) == 1
    assert strategy.is_chief == strategy.extended.should_save_summary


@needs_ranks(2)
@pytest.mark.parametrize("strict", ["0", "1"])
def test_the_sum_of_a_plain_value_is_refused_on_all_ranks_or_on_none(comm, make_strategy, strict):
    strategy = make_strategy(STRICT=strict)
    for op in ("sum", "prod"):
        with pytest.raises(InvalidArgumentError, match=f"{op.upper()} of a value that is not a per-replica value is ambiguous"):
            strategy.reduce(op, [PerReplica(1.0), float(comm.rank == 1)], axis=None)
        assert strategy.reduce(op, [PerReplica(1.0), 0.0], axis=None)[1] == 0
    assert comm.allreduce(1) == comm.size


def test_a_maximum_of_booleans_does_not_open_the_way_for_their_sum(comm, strategy):
    flags = np.array([comm.rank == 0, True])
    assert strategy.reduce("mean", PerReplica(flags), axis=0) == (comm.size + 1) / (2 * comm.size)
    for _ in range(3):
        with pytest.raises(UnsupportedDtypeError, match="SUM is not defined for array 0 of dtype bool"):
            strategy.communicator.all_reduce("sum", flags)
        found = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("max", flags))
        assert strategy.local(found).tolist() == [True, True]
        with pytest.raises(UnsupportedDtypeError):
            strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", flags))
    assert comm.allreduce(1) == comm.size


@needs_ranks(2)
def test_structures_or_merge_calls_that_differ_between_replicas_raise_on_all(comm, strategy):
    value = {"a": np.ones(3), "b": None} if comm.rank else {"a": None, "b": np.ones(3)}  # None is part of it
    for call in (
        in_replica(lambda context, value: context.all_reduce("sum", value)),
        in_replica(lambda context, value: context.start_all_reduce("sum", value).wait()),
        lambda strategy, value: strategy.reduce("sum", strategy.run(lambda: value), axis=None),
        lambda strategy, value: strategy.gather(strategy.run(lambda: value), axis=0),
        lambda strategy, value: strategy.broadcast(strategy.run(lambda: value)),
    ):
        with pytest.raises(AgreementError, match="ranks made different calls") as raised:
            call(strategy, value)
        assert "'a': *, 'b': None" in str(raised.value)
        assert "'a': None, 'b': *" in str(raised.value)
    with pytest.raises(AgreementError, match="ranks made different calls"):
        in_replica(lambda context, weight: context.all_reduce("mean", 1.0, weight=weight))(strategy, 1 if comm.rank else None)
    for call, args in ((ALL_REDUCE if comm.rank == 1 else MERGE, (1.0,)), (MERGE, (1,) * (1 + (comm.rank == 1)))):
        with pytest.raises(AgreementError, match=r"ranks made different calls(.|\n)*merge_call with"):
            in_replica(call)(strategy, args)
    assert comm.allreduce(1) == comm.size


def packs_sent(strategy, arrays, options):
    """Return the bytes of each pack of an all-reduce: one that is copied together, or is sent from its one array."""
    timeline = strategy.extended.communicator.timeline
    timeline.enabled = True
    timeline.events.clear()
    size, given = strategy.num_replicas_in_sync, [array + array.dtype.type(strategy.rank) for array in arrays]
    totals = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", given, options=options))
    for array, total in zip(arrays, strategy.local(totals), strict=True):
        assert total.tolist() == (array.astype(int) * size + sum(range(size))).astype(array.dtype).tolist()
    names = ["", *(event.name for event in timeline.events)]
    packs = [name == "copy in" or (name.endswith("all_reduce") and before != "copy in") for before, name in pairwise(names)]
    return [event.nbytes for event, is_pack in zip(timeline.events, packs, strict=True) if is_pack]


def assert_about(found, sizes, size):
    """Check sizes of buffers; one may be longer, by what makes its elements, of at most 4 bytes, divide by the ranks."""
    assert len(found) == len(sizes), (found, sizes)
    assert all(0 <= buffer - wanted < 4 * size for buffer, wanted in zip(found, sizes, strict=True)), (found, sizes)


# options of the strategy, those of calls, and the packs that they make
PACKS = [
    ("bytes_per_pack", 0, [(25, [40, 30, 30]), (0, [100]), (1, [40, 30, 20, 10]), (40, [70, 30])]),
    ("bytes_per_pack", 25, [(None, [40, 30, 30]), (50, [70, 30])]),
    ("num_packs", 3, [(None, [33, 33, 34]), (1, [100]), (0, [40, 30, 20, 10])]),
]


@pytest.mark.parametrize(("option", "own", "calls"), PACKS)
def test_packs_begin_with_the_last_arrays_or_are_even_and_options_of_a_call_win(comm, world, make_strategy, option, own, calls):
    arrays = [np.full(count, count, np.uint8) for count in (10, 20, 30, 40)]
    for kind in [mpistrat.MultiWorkerMirroredStrategy] + [mpistrat.MirroredStrategy] * (world.num_nodes == 1):
        strategy = make_strategy(kind, communication_options=CommunicationOptions(algorithm="flat", **{option: own}))
        for value, packs in calls:
            found = packs_sent(strategy, arrays, None if value is None else CommunicationOptions(**{option: value}))
            assert_about(found, packs, comm.size)


class Lost(dict):
    def __iter__(self):
        raise OSError("the disk is gone")

    keys = items = __iter__


class Unreadable:
    def __array__(self, dtype=None, copy=None):
        raise OSError("the disk is gone")


def in_replica(call):
    """Return what calls ``call(context, value)`` in each replica."""
    return lambda strategy, value: strategy.run(lambda: call(mpistrat.get_replica_context(), value))


def made(strategy):
    with strategy.scope():
        return mpistrat.Variable(0.0)


def update(strategy, argument):
    strategy.extended.update(made(strategy), lambda variable, argument: variable.assign(argument), (argument,))


def to_one_device(strategy, value):
    strategy = mpistrat.Strategy(mpistrat.StrategyExtended(strategy.extended.communicator, mpistrat.ReductionToOneDevice()))
    strategy.run(lambda: mpistrat.get_replica_context().all_reduce("max", value))


ALL_REDUCE = lambda context, value: context.all_reduce("sum", value)  # noqa: E731
MERGE = lambda context, args: context.merge_call(lambda strategy, *args: 1.0, args=args)  # noqa: E731

TEXT, ONE = PerReplica(np.array("text")), PerReplica(1.0)
# what is called with the first argument on rank 0, with the second on the others: what rank 0 raises, and what the others read
REFUSED_BY_ONE = {
    "update": (update, TEXT, 1.0, TypeError, "an argument of extended.update has dtype"),
    "update by nothing": (
        lambda strategy, fn: strategy.extended.update(made(strategy), fn),
        *(None, lambda variable: None, TypeError, "must be callable"),
    ),
    "update_non_slot": (
        lambda strategy, argument: strategy.extended.update_non_slot(None, lambda argument: None, (argument,)),
        *(TEXT, 1.0, TypeError, "an argument of extended.update has dtype"),
    ),
    "to one device": (to_one_device, 1j, 1.0, TypeError, "MAX is not defined for value of dtype complex128"),
    "gather": (
        lambda strategy, value: strategy.gather(value, axis=0),
        *(mpistrat.IndexedSlices(np.ones((1, 1)), [0]), np.ones(1), NotImplementedError, "cannot be gathered"),
    ),
    "reduce": (
        lambda strategy, value: strategy.reduce("mean", value, axis=None),
        *(Mirrored(1.0), ONE, AgreementError, "0 arrays to combine"),
    ),
    "options of reduce": (
        lambda strategy, options: strategy.reduce("mean", ONE, None, options),
        *("RING", None, InvalidArgumentError, "options must be CommunicationOptions or None; got 'RING'"),
    ),
    "an array that cannot be read": (in_replica(ALL_REDUCE), Unreadable(), 1.0, OSError, "the disk is gone"),
    **{
        f"a nest that cannot be gone through, {name}": (call, Lost(a=1), {"a": 1.0}, OSError, "the disk is gone")
        for name, call in {
            "all_reduce": in_replica(ALL_REDUCE),
            "start_all_reduce": in_replica(lambda context, value: context.start_all_reduce("sum", value).wait()),
            "broadcast": lambda strategy, value: strategy.broadcast(value),
            "reduce": lambda strategy, value: strategy.reduce("mean", value, axis=None),
        }.items()
    },
    "arguments of merge_call": (in_replica(MERGE), 3, (), InvalidArgumentError, "args must be a list or tuple"),
    "a ragged list": (in_replica(ALL_REDUCE), [1, [2, 3]], np.ones(2), AgreementError, "different calls"),
    "no parts": (
        in_replica(lambda c, one: c.all_to_all(one and one * c.num_replicas_in_sync)),
        None,
        [1.0],
        TypeError,
        "not iterable",
    ),
    "a weight": (in_replica(lambda c, weight: c.all_reduce("mean", 1.0, weight=weight)), -1, 1, ValueError, "weight"),
    "an axis": (
        lambda strategy, shape: strategy.reduce("sum", strategy.run(lambda: np.ones(shape)), axis=1),
        *(2, (2, 2), ValueError, "axis"),
    ),
}


@needs_ranks(2)
def test_what_one_rank_refuses_no_other_waits_for(comm, make_strategy):
    first = comm.rank == 0
    for name, (call, refused, accepted, error, message) in REFUSED_BY_ONE.items():
        strategy = make_strategy(STRICT="1")
        with case(name):
            with pytest.raises(error if first else AgreementError, match=message):
                call(strategy, refused if first else accepted)
            # and all are in step again
            assert strategy.reduce("sum", PerReplica(1.0), axis=None) == comm.size


@needs_ranks(2)
def test_what_one_rank_refuses_of_a_known_call_is_its_own_error_and_told_to_the_others(comm, make_strategy):
    strategy, call, first = make_strategy(STRICT="1"), in_replica(ALL_REDUCE), comm.rank == 0
    for _ in range(3):
        call(strategy, 1.0)
    told = "the disk is gone" if first else "rank 0: all_reduce, which failed: OSError: the disk is gone"
    with pytest.raises(OSError if first else AgreementError, match=told):
        call(strategy, Unreadable() if first else 1.0)


@on_ranks(3)
def test_weights_agree_at_any_number_of_replicas(comm, strategy):
    batch_size = 136  # the last batch has one row
    alone = train(mpistrat.OneDeviceStrategy(), epochs=1, batch_size=batch_size) if comm.rank == 0 else None
    expected, _, expected_losses = comm.bcast(alone)
    weights, _, losses = train(strategy, epochs=1, batch_size=batch_size)
    # each step adds in another order, and moves weights below 1 by less than 1: it may be off by one rounding of such a number
    bound = len(losses) * np.finfo(np.float32).eps
    for name, value in weights.items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=bound)
    np.testing.assert_allclose(losses, expected_losses, rtol=bound, atol=bound)
    for name, value in weights.items():
        assert len(set(comm.allgather(value.tobytes()))) == 1, f"replicas hold different {name}"


@on_ranks(3)
def test_training_learns_from_what_one_rank_loads(comm, make_strategy, monkeypatch):
    seen, began, load = [], [], train_digits.load
    monkeypatch.setattr(train_digits, "load", lambda: began.append("load") or load())
    _, accuracy, losses = train(
        make_strategy(),
        on_start=lambda epoch: began.append(("start", epoch + len(seen))),
        on_step=lambda epoch, loss, examples: seen.append((epoch, loss, examples)),
    )
    assert began == ["load"] * (comm.rank == 0) + [("start", 0)]
    assert accuracy >= 0.95
    assert losses[-1] < 0.2 < losses[0]
    assert [loss for _, loss, _ in seen] == losses
    assert sum(examples for _, _, examples in seen) == 12 * 1497


@on_ranks(3)
def test_training_goes_on_after_the_epochs_that_were_saved(comm, make_strategy, tmp_path):
    folder, strategy, began = Path(comm.bcast(str(tmp_path))) / "saved", make_strategy(), []
    weights, accuracy, losses = train(strategy, epochs=3)
    again = []
    for epochs in (2, 3, 3):
        found = train(strategy, epochs, checkpoints=folder, on_start=began.append)
        again += found[2]
    np.testing.assert_allclose(again, losses, rtol=1e-5)
    assert (began, found[1]) == ([0, 2, 3], accuracy)
    for name, value in weights.items():
        np.testing.assert_allclose(found[0][name], value, rtol=1e-4, atol=1e-5)


@pytest.fixture
def carried_out(monkeypatch):
    """Note what carries out a call, by what `explain` calls it."""
    noted = set()

    def note(kind, verb, text):
        run = getattr(kind, verb)

        def noting(self, *arguments):
            if all(getattr(each, "dtype", None) != np.int64 for each in arguments):  # these compare the call
                noted.add(text(self))
            return run(self, *arguments)

        monkeypatch.setattr(kind, verb, noting)

    note(SmallAllReduce, "steps", lambda self: self.name)
    note(MpiAllReduce, "steps", lambda self: self.name)
    note(Exchange, "run", lambda self: "cross-memory attach inside the node")
    note(BoundRing, "run", lambda self: "mpi_ring between nodes")
    note(_Ordered, "run", lambda self: "added in the order of the ranks")
    return noted


@on_ranks(2, 3)
def test_it_says_what_carries_out_the_call(ops, carried_out):
    counts = ([1], [3, 5], [20_000], [100_000], [60_000, 60_000], [500_000], [250_000, 250_000], [1_300_000])
    ops.timeline.enabled = True  # every call runs its steps
    for algorithm, deterministic, each in product(("auto", "flat", "hierarchical"), (False, True), counts):
        options = CommunicationOptions(algorithm=algorithm, deterministic=deterministic)
        given = [np.ones(count, np.float32) for count in each]
        [pack] = ops.explain(given, options).packs
        carried_out.clear()
        ops.timeline.events.clear()
        ops.all_reduce("sum", given, options)
        phases = [str(phase) for phase in pack.choice.plan.phases]
        assert {event.name.split(" rail")[0] for event in ops.timeline.events} - {"copy in", "copy out"} == set(phases)
        assert any(event.name == "copy in" for event in ops.timeline.events) != pack.choice.plan.is_direct
        told = pack.transport
        assert all(text in told for text in carried_out)
        assert carried_out or told.removeprefix("shared_memory inside the node").removeprefix(", ") in ("", "mpi between nodes")


def test_one_rank_may_ask_alone_and_what_cannot_be_explained_is_refused(comm, strategy):
    if comm.size > 1 and comm.rank == 0:
        assert "pack 0 " in str(strategy.explain(np.ones(5)))
        text = str(strategy.explain(np.ones(2), CommunicationOptions(deterministic=True)))
        assert "why        deterministic=True adds in the order of the replicas\n" in text
    with pytest.raises(InvalidArgumentError, match="options must be CommunicationOptions or None; got 3"):
        strategy.explain(np.ones(2), 3)
    with pytest.raises(UnsupportedDtypeError):
        strategy.explain(np.array(["a"]))
    assert str(strategy.explain({})).endswith("nothing is sent")


@needs_ranks(2)
def test_options_of_a_call_restore_what_auto_chooses(make_strategy):
    strategy = make_strategy(communication_options=CommunicationOptions(algorithm="flat"))
    value, auto = np.ones(1 << 20, np.float32), CommunicationOptions(algorithm="auto")
    chosen = str(strategy.explain(value, auto))
    assert "asked for by name" in str(strategy.explain(value))
    assert "asked for by name" not in chosen
    assert strategy.run(lambda: mpistrat.get_replica_context().all_reduce("max", np.ones(1), auto)) is not None
