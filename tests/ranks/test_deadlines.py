"""A rank that does not come in time: every verb ends, says who is missing, and is the last of its strategy."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import pytest

from mpistrat.cross_device.hierarchical import HierarchicalCollectives
from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.errors import AgreementError, DeadlineExceededError, UnavailableError
from mpistrat.groups.arrival import LONGEST_GRACE_SECONDS
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from mpistrat.topology.world import World
from tests.launches import needs_ranks

SUM = ReduceOp.SUM
SECONDS = 0.3
# beside the deadline and the grace: what a busy machine may take until it looks at the clock
PATIENCE_SECONDS = SECONDS + LONGEST_GRACE_SECONDS + 3

SHAPES = {2: "2x1", 3: "2+1", 4: "2x2", 8: "2x4"}
ONES = np.ones(10, np.float32)

VERBS = {
    "flat": lambda ops: ops.all_reduce(SUM, [ONES], CommunicationOptions(algorithm="flat")),
    "hierarchical": lambda ops: ops.all_reduce(SUM, [ONES, ONES], CommunicationOptions(algorithm="hierarchical")),
    "pipelined": lambda ops: ops.all_reduce(SUM, [np.ones(400_000)], CommunicationOptions(algorithm="pipelined")),
    "leader": lambda ops: ops.all_reduce(SUM, [ONES], CommunicationOptions(algorithm="leader" if ops.size > 2 else "auto")),
    "deterministic": lambda ops: ops.all_reduce(SUM, [ONES], CommunicationOptions(deterministic=True)),
    "started": lambda ops: ops.start_all_reduce(SUM, [ONES]).wait(),
    "reduce_scatter": lambda ops: ops.reduce_scatter(SUM, ONES),
    "all_gather": lambda ops: ops.all_gather(ONES),
    "gather": lambda ops: ops.gather(ONES),
    "all_to_all": lambda ops: ops.all_to_all([ONES] * ops.size),
    "broadcast": lambda ops: ops.broadcast(ONES),
    "barrier": lambda ops: ops.barrier(),
    "agree": lambda ops: ops.agree("agree()"),
}
NAMES = {name: "all_reduce" for name in ("flat", "hierarchical", "pipelined", "leader", "deterministic", "started")}


def make(comm, seconds=SECONDS):
    ops = HierarchicalCollectives(
        Hierarchy(comm, World.from_shape(SHAPES[comm.size])), CommunicationOptions(timeout_seconds=seconds)
    )
    for call in VERBS.values():
        call(ops)
    return ops


def past_deadline(comm, late, seconds):
    """Keep the late rank away until the others have given up; it then knows that they have."""
    if comm.rank == late:
        time.sleep(seconds)


@needs_ranks(2)
@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_ends_and_names_who_is_missing(comm, monkeypatch, verb, strict):
    monkeypatch.setenv("MPISTRAT_STRICT", strict)
    ops = make(comm)
    late, number = comm.size - 1, ops.num_collectives + 1
    comm.Barrier()
    past_deadline(comm, late, SECONDS + 0.3)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError) as caught:
        VERBS[verb](ops)
    took, message = time.monotonic() - started, str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert message.startswith(f"rank {comm.rank} (node{ops.world.place(comm.rank).node_index}): ")
    assert f": collective {number}, {NAMES.get(verb, verb)}(" in message
    node = ops.world.place(late).node_index
    if comm.rank == late:
        assert "comes too late: rank" in message
        assert took < 0.5 * PATIENCE_SECONDS, "it need not wait"
    else:
        assert message.endswith(f"not all ranks have arrived: missing rank {late} (node{node})")
        assert SECONDS <= took < PATIENCE_SECONDS
    for again in VERBS.values():
        with pytest.raises(UnavailableError, match=f"an earlier {NAMES.get(verb, verb)} did not end .DeadlineExceededError."):
            again(ops)
    ops.close()
    comm.Barrier()


@needs_ranks(2)
@pytest.mark.parametrize("strict", ["0", "1"])
def test_the_first_call_of_a_shape_has_the_deadline_too(comm, monkeypatch, strict):
    monkeypatch.setenv("MPISTRAT_STRICT", strict)
    ops = HierarchicalCollectives(Hierarchy(comm, World.from_shape(f"1x{comm.size}")))
    past_deadline(comm, 0, SECONDS + 0.3)
    with pytest.raises(
        DeadlineExceededError, match=r"collective 1, all_reduce\(SUM.*(missing rank 0 \(node0\)$|comes too late)"
    ):
        ops.all_reduce(SUM, [np.ones(123_456)], CommunicationOptions(timeout_seconds=SECONDS, algorithm="hierarchical"))
    comm.Barrier()


@needs_ranks(3)
def test_several_that_are_missing_are_all_named(comm):
    ops = make(comm)
    missing = list(range(1, comm.size))
    past_deadline(comm, comm.rank if comm.rank in missing else -1, SECONDS + 1.5)
    nodes = r"rank 1 \(node0\), rank" if comm.size < 8 else r"ranks 1-3 \(node0\), rank"
    with pytest.raises(DeadlineExceededError, match=f"comes too late: rank 0 .node0. gave up waiting|missing {nodes}"):
        ops.barrier()
    comm.Barrier()


@needs_ranks(2)
@pytest.mark.parametrize("strict", ["0", "1"])
def test_the_shortest_deadline_holds_for_all(comm, monkeypatch, strict):
    monkeypatch.setenv("MPISTRAT_STRICT", strict)
    ops = make(comm, seconds=30)
    comm.Barrier()
    past_deadline(comm, comm.size - 1, SECONDS + 0.3)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="missing rank|comes too late") as caught:
        ops.barrier(CommunicationOptions(timeout_seconds=SECONDS if comm.rank == 0 else 30))
    assert time.monotonic() - started < PATIENCE_SECONDS
    if comm.rank not in (0, comm.size - 1):
        assert "was given up by rank 0 (node0), whose time was up; not all ranks have arrived" in str(caught.value)
    comm.Barrier()


@needs_ranks(2)
def test_in_strict_mode_a_rank_without_a_deadline_hears_of_others(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "1")
    ops = make(comm, seconds=None)
    comm.Barrier()
    past_deadline(comm, comm.size - 1, SECONDS + 0.3)
    with pytest.raises(DeadlineExceededError, match="missing rank|comes too late"):
        ops.barrier(CommunicationOptions(timeout_seconds=SECONDS) if comm.rank == 0 else None)
    comm.Barrier()


@needs_ranks(2)
def test_who_is_late_but_in_time_is_no_error(comm):
    ops = make(comm, seconds=10)
    for verb in VERBS.values():
        past_deadline(comm, comm.size - 1, 0.02)
        verb(ops)
    ops.close()


@needs_ranks(2)
def test_a_deadline_leaves_agreement_as_it_is(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "1")
    ops = make(comm, seconds=10)
    with pytest.raises(AgreementError, match="ranks made different calls"):
        ops.barrier() if comm.rank else ops.all_gather(ONES)
    with pytest.raises((ValueError, AgreementError), match="root must be a replica"):
        ops.broadcast(ONES, root=-1 if comm.rank else 0)
    ops.barrier()
    ops.close()


@needs_ranks(2)
def test_settings_of_which_only_some_have_a_deadline_are_refused(comm, monkeypatch):
    if comm.rank:
        monkeypatch.setenv("MPISTRAT_TIMEOUT_SECONDS", "5")
    with pytest.raises(AgreementError, match=r"(?s)rank 0: settings .*MPISTRAT_TIMEOUT_SECONDS not set"):
        HierarchicalCollectives(Hierarchy(comm, World.from_shape(f"1x{comm.size}")))


@needs_ranks(2)
def test_the_setting_is_the_deadline_of_calls_that_name_none(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_TIMEOUT_SECONDS", str(SECONDS))
    ops = HierarchicalCollectives(Hierarchy(comm, World.from_shape(f"1x{comm.size}")))
    past_deadline(comm, 0, SECONDS + 0.1)
    ops.barrier(CommunicationOptions(timeout_seconds=0))  # no deadline here
    past_deadline(comm, 0, SECONDS + 0.3)
    with pytest.raises(DeadlineExceededError, match="did not end within 0.3 s|comes too late"):
        ops.barrier()
    comm.Barrier()


@needs_ranks(2)
def test_steps_that_do_not_end_name_who_does_not_answer(comm, monkeypatch):
    # all have arrived, and one stops inside the call
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    ops = make(comm)
    comm.Barrier()
    late = comm.size - 1
    if comm.rank == late:
        monkeypatch.setattr("mpistrat.cross_device.hierarchical.run_recipe", lambda *_: stopped())
        with suppress(DeadlineExceededError):
            VERBS["deterministic"](ops)
        time.sleep(SECONDS + 1.5)
    else:
        with pytest.raises(
            DeadlineExceededError, match=rf"did not end within 0.3 s; all .* no answer from rank {late} \(node1\)"
        ):
            VERBS["deterministic"](ops)
        with pytest.raises(UnavailableError):
            ops.barrier()
    comm.Barrier()
    if comm.rank == late:
        # it hears at its next call, or when it closes, that the others will not come
        with pytest.raises((DeadlineExceededError, UnavailableError)):
            ops.barrier()
    ops.close()
    comm.Barrier()


def stopped():
    """Steps of a rank that leaves the others alone, and goes on as if nothing were."""
    return iter(())


@needs_ranks(2)
def test_a_missed_deadline_of_a_started_all_reduce(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    ops = make(comm, seconds=None)
    options = CommunicationOptions(deterministic=True, timeout_seconds=SECONDS)
    work = ops.start_all_reduce(SUM, [ONES, ONES], options)
    with pytest.raises(UnavailableError, match="an earlier all_reduce is still under way: wait for it first"):
        ops.barrier()
    if comm.rank == 0:
        with pytest.raises(DeadlineExceededError, match=r"all_reduce\(SUM, .* did not end within 0.3 s; all ranks had arrived"):
            work.wait()
        with pytest.raises(DeadlineExceededError):
            work.wait()
    comm.Barrier()
