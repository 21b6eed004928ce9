"""strategy.explain: what it says before and after the call, on every shape; and that it sends nothing."""

from itertools import product

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.experimental import CommunicationOptions
from mpistrat.transports.mpi_world import MpiAllReduce
from mpistrat.transports.pairwise import _Ordered
from mpistrat.transports.ring import BoundRing
from mpistrat.transports.shared_memory import Exchange
from mpistrat.transports.small import SmallAllReduce
from tests.launches import needs_ranks, on_ranks

pytestmark = on_ranks(1, 3)


@pytest.fixture
def carried_out(monkeypatch):
    """Note what carries out a call, by what `explain` calls it."""
    noted = set()

    def note(kind, verb, text):
        run = getattr(kind, verb)

        def noting(self, *arguments):
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


@needs_ranks(2)
def test_one_rank_may_ask_alone(strategy):
    if strategy.extended.communicator.rank == 0:
        assert "pack 0 " in str(strategy.explain(np.ones(5)))
    assert float(strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", 1.0)).values[0]) > 1


@needs_ranks(2)
def test_in_deterministic_mode_nothing_is_chosen(strategy):
    text = str(strategy.explain(np.ones(2), mpistrat.experimental.CommunicationOptions(deterministic=True)))
    assert "why        deterministic=True adds in the order of the replicas\n" in text


def test_what_cannot_be_explained_is_refused(strategy):
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


def test_no_plan_is_chosen_for_a_number_of_elements_that_cannot_be(make_ops):
    with pytest.raises(InvalidArgumentError, match="count must be at least 0; got -3"):
        make_ops().choose(-3, np.dtype(np.float32))
