"""The lanes: whatever waits, each lane does its steps in one order, and at most so many chunks are in flight."""

import random
from itertools import accumulate, islice

from hypothesis import given
from hypothesis import strategies as st

from mpistrat.execution.compile import interleave
from mpistrat.execution.program import Lanes, nothing, overlap
from mpistrat.steps import WAITING, WORKED


def play(num_chunks, depth, max_in_flight, seed):
    """Run chunks whose steps wait at random; return what began and ended."""
    random_steps = random.Random(seed)
    log = []

    def part(name):
        def steps(chunk):
            log.append((name, chunk, "begins"))
            for _ in range(random_steps.randrange(4)):
                yield random_steps.random() < 0.5
            log.append((name, chunk, "ends"))

        return steps

    for _ in overlap(Lanes(part("head"), part("middle"), part("tail"), num_chunks), depth, max_in_flight):
        pass
    return log


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 5), st.integers())
def test_order_and_depth(num_chunks, depth, max_in_flight, seed):
    log = play(num_chunks, depth, max_in_flight, seed)
    at = {event: position for position, event in enumerate(log)}
    assert len(log) == len(at) == 6 * num_chunks, "everything, once"
    for chunk in range(num_chunks):
        assert at["head", chunk, "ends"] < at["middle", chunk, "begins"]
        assert at["middle", chunk, "ends"] < at["tail", chunk, "begins"]
        if chunk >= depth:
            assert at["tail", chunk - depth, "ends"] < at["head", chunk, "begins"], "no more than depth under way"
    middles = [(chunk, what) for name, chunk, what in log if name == "middle"]
    assert [chunk for chunk, what in middles if what == "begins"] == list(range(num_chunks)), "they begin in order"
    balance = list(accumulate(1 if what == "begins" else -1 for _, what in middles))
    assert max(balance) <= max_in_flight


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 5), st.tuples(st.integers(), st.integers()))
def test_the_order_of_a_lane_depends_on_indexes_only(num_chunks, depth, max_in_flight, seeds):
    logs = [play(num_chunks, depth, max_in_flight, seed) for seed in seeds]
    intra, inter = ([[event for event in log if (event[0] == "middle") == middle] for log in logs] for middle in (False, True))
    assert intra[0] == intra[1]
    assert max_in_flight > 1 or inter[0] == inter[1]


def test_the_order_that_is_documented():
    log = play(4, 2, 1, 0)
    intra = [f"{name} {chunk}" for name, chunk, what in log if what == "begins" and name != "middle"]
    assert intra == ["head 0", "head 1", "tail 0", "head 2", "tail 1", "head 3", "tail 2", "tail 3"]


def test_a_wait_of_one_lane_does_not_stop_the_other():
    released: list[int] = []

    def middle(chunk):
        while chunk not in released:
            yield WAITING

    entered: list[int] = []

    def head(chunk):
        entered.append(chunk)
        yield WORKED

    steps = overlap(Lanes(head, middle, num_chunks=3), 3, 1)
    # all heads come through while the middle of chunk 0 waits; then everybody waits, and says so
    found = list(islice(steps, 50))
    assert entered == [0, 1, 2]
    assert found[-10:] == [WAITING] * 10
    released += [0, 1, 2]
    assert WAITING in [WAITING, *steps]


def test_several_middles_are_in_flight():
    entered: list[int] = []

    def middle(chunk):
        entered.append(chunk)
        while len(entered) < 3:
            yield WAITING  # none ends before the third has begun

    assert WORKED in list(overlap(Lanes(lambda chunk: iter([WORKED]), middle, num_chunks=3), 3, 3))
    assert entered == [0, 1, 2]


def test_a_step_worked_if_either_lane_did():
    idle = overlap(Lanes(nothing, lambda chunk: iter([WAITING] * 5)), 1, 1)
    found = list(idle)
    assert found.count(WAITING) >= 4
    assert found[0] is WORKED, "the middle has begun"


def test_a_lane_that_waits_does_not_stop_the_others():
    met: list[str] = []

    def lane(name, peer):
        met.append(name)
        while peer not in met:
            yield WAITING

    found = list(interleave([lane("first", "second"), iter([]), lane("second", "first")]))
    assert met == ["first", "second"]
    assert found == [WAITING, WAITING], "the first learns of the second one turn later"
    assert list(interleave([])) == []
    assert list(interleave([iter([WAITING, WORKED]), iter([WAITING])])) == [WAITING, WORKED, WAITING]
