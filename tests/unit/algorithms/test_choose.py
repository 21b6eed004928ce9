"""Choosing: by limits or by what was measured, the reasons, and the errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.algorithms.choose import PLANNERS, Measured, choose, choose_on_gpus
from mpistrat.algorithms.planners import hierarchical_from_bytes
from mpistrat.topology.world import World
from tests.unit.worlds import random_worlds

KIB, MIB = 2**10, 2**20


def chosen(shape, num_bytes):
    """Return the algorithm that is chosen, or ``chunks`` if it is hierarchical on several."""
    plan = choose(World.from_shape(shape), num_bytes // 4, 4).plan
    return "chunks" if plan.depth > 1 else plan.algorithm


NODES = (8, KIB, 8 * KIB, 128 * KIB), (512 * KIB, MIB), (4 * MIB, 16 * MIB, 64 * MIB)
ONE_NODE = (8, 2 * KIB, 128 * KIB), (), (16 * MIB, 64 * MIB)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        *((shape, NODES) for shape in ("4x2", "4x2:cyclic", "4x8", "3+1+2+2")),
        ("2x2", ((8, 128 * KIB), (384 * KIB,), (MIB, 16 * MIB))),
        *((shape, ONE_NODE) for shape in ("1x4", "1x8")),
        ("1x2", ((8, 64, 256), (64 * KIB, 512 * KIB), (16 * MIB, 64 * MIB))),
        ("2x1", ((256 * KIB,), (512 * KIB, 4 * MIB), (8 * MIB, 64 * MIB))),
        ("8x1", ((16 * KIB, 256 * KIB), (512 * KIB, 64 * MIB), ())),  # where steps decide
        ("64x8", ((MIB,), (8 * MIB, 64 * MIB), ())),
    ],
)
def test_it_goes_from_flat_to_hierarchical_to_chunks(shape, sizes):
    for name, chosen_for in zip(("flat", "hierarchical", "chunks"), sizes, strict=True):
        assert {size: chosen(shape, size) for size in chosen_for} == dict.fromkeys(chosen_for, name)


def test_the_reason_names_the_limit_or_the_two_fastest_or_what_was_asked_for():
    world = World.from_shape("4x8")
    assert choose(world, 1000, 4).reason == "on such nodes flat takes less than 288 KiB"
    assert choose(world, MIB, 4).reason == "on such nodes hierarchical takes 288 KiB and more"
    assert choose(world, 144 * KIB // 4, 4, wire_itemsize=2).reason == "on such nodes hierarchical takes 144 KiB and more"
    assert choose(World.from_shape("1x4"), MIB // 4, 4, wire_itemsize=2).plan.algorithm == "flat", "nothing is cast"
    measured = Measured({"flat": {16: 2e-3}, "hierarchical": {16: 1e-3}}, "a file")
    choice = choose(world, 4, 4, measured=measured)
    assert choice.plan.algorithm == "hierarchical"
    assert choice.reason == "hierarchical is the fastest as measured: 1 ms; next: flat 2 ms"
    choice = choose(World.from_shape("4x2"), 16 * MIB, 4, "flat")
    assert (choice.plan.algorithm, choice.reason) == ("flat", "flat was asked for by name; auto would choose hierarchical")


@pytest.mark.parametrize(("shape", "chunk_bytes", "num_chunks"), [("1x8", 0, 1), ("2x2", 0, 4), ("1x8", 8 * MIB, 8)])
def test_on_gpus_a_buffer_stays_whole_where_nothing_overlaps_unless_chunks_are_asked_for(shape, chunk_bytes, num_chunks):
    choice = choose_on_gpus(World.from_shape(shape), 16 * MIB, 4, chunk_bytes=chunk_bytes)
    assert (choice.plan.algorithm, choice.plan.num_chunks) == ("hierarchical", num_chunks)
    assert choice.plan.depth == min(3, num_chunks)
    assert (choice.reason, choice.seconds) == ("on GPUs auto is hierarchical", {})


def test_on_gpus_a_node_has_one_phase_and_a_name_is_taken():
    assert [str(phase) for phase in choose_on_gpus(World.from_shape("1x8"), 2**28, 4).plan.phases] == ["intra all_reduce"]
    assert choose_on_gpus(World.from_shape("1x8"), 2**28, 4).plan.depth == 1
    choice = choose_on_gpus(World.from_shape("2x2"), 16 * MIB, 4, "flat")
    assert (choice.plan.algorithm, choice.reason) == ("flat", "flat was asked for by name")


def test_one_rank_and_empty_buffers_have_a_plan_and_chunks_are_as_asked_for():
    assert choose(World.from_shape("1x1"), 1000, 4).plan.phases == ()
    assert choose(World.from_shape("2x2"), 0, 4).plan.num_chunks == 0
    assert choose(World.from_shape("2x2"), MIB, 4, "hierarchical", chunk_bytes=256 * KIB).plan.num_chunks == 16


@given(random_worlds, st.integers(0, 10**7), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_auto_always_has_a_repeatable_answer(world, count, itemsize, tenths):
    chunk_bytes = count * itemsize // 10 if tenths else 0
    choice = choose(world, count, itemsize, chunk_bytes=chunk_bytes)
    assert choose(World(world.nodes), count, itemsize, chunk_bytes=chunk_bytes) == choice
    assert (choice.plan.algorithm == "flat") == (count * itemsize < hierarchical_from_bytes(world))


def test_what_was_measured_is_predicted_and_between_and_beyond_it_by_the_bytes():
    measured = Measured({"flat": {64: 3.0, 16: 1.0}, "hierarchical": {}})
    found = {num_bytes: measured.predict(num_bytes) for num_bytes in (0, 8, 16, 40, 64, 128)}
    assert found == {n: {"flat": seconds} for n, seconds in zip(found, (1.0, 1.0, 1.0, 2.0, 3.0, 6.0), strict=True)}


_ORDERS = st.permutations(range(1, 1 + len(PLANNERS)))


@given(st.sampled_from(["1x2", "1x4", "2x2", "3+1", "4x1"]), _ORDERS, _ORDERS)
def test_the_fastest_measured_is_chosen(shape, small, large):
    small, large = ([unit * place for place in order] for unit, order in ((1e-5, small), (1e-3, large)))
    measured = Measured({name: {64: small[i], 2**16: large[i]} for i, name in enumerate(PLANNERS)})
    for num_bytes, seconds in ((4, small), (64, small), (2**16, large), (2**30, large)):
        choice = choose(World.from_shape(shape), num_bytes // 4, 4, measured=measured)
        assert choice.plan.algorithm == [*PLANNERS][seconds.index(min(seconds))]
