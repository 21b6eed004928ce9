"""Calls that are drawn from a seed: all ranks draw the same, and what some do otherwise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from tests.disagreements.calls import Call
from tests.disagreements.case import Plan
from tests.disagreements.deviations import ARGUMENTS, ORDERS, TOLD, Calls, outcomes

DTYPES = ("float32", "float64", "int32", "int64", "float16", "bfloat16", "int8", "uint8")
VERBS = ("all_reduce",) * 5 + ("started", "reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "barrier")
DIFFERENCES = ("op", "dtype", "shape", "place", "verb", "added", *ORDERS)
_PAIRED = ("all_reduce",) * 6 + ("reduce", "all_gather", "broadcast", "reduce_scatter", "barrier")
_TAKES = {
    "op": ("all_reduce", "started", "reduce", "reduce_scatter"),
    "place": ("reduce", "all_gather", "broadcast", "reduce_scatter"),
}


def draw(random_: random.Random, ranks: int, most: int, verbs: Sequence[str] = VERBS, least: int = 1) -> Call:
    """Return a call of at most, and about at least, so many elements."""
    verb = random_.choice(verbs)
    if verb == "barrier":
        return Call(verb)
    dtype, shape, place = random_.choice(DTYPES), _shape(random_, most, least), None
    if verb in ("all_gather", "reduce_scatter"):
        shape = shape or (1,)
        place = random_.randrange(len(shape))
    if verb == "broadcast":
        place = random_.randrange(ranks)
    return Call(verb, shape, random_.choice(_ops(dtype)) if verb in _TAKES["op"] else "sum", dtype, place)


def _shape(random_: random.Random, most: int, least: int = 1) -> tuple[int, ...]:
    count = int(2 ** random_.uniform(math.log2(least), math.log2(most)))
    axes = random_.choice((0, 1, 1, 1, 2, 2, 3)) if count < 3 else random_.choice((1, 1, 1, 2, 2, 3))
    shape = [random_.randint(1, max(int(count ** (1 / axes)), 1)) for _ in range(axes - 1)]
    return (*shape, max(count // math.prod(shape), 1)) if axes else ()


def _ops(dtype: str) -> tuple[str, ...]:
    # products of what a case holds leave the range of small types, means of integers are cut, and bfloat16 has eight bits
    return ("sum", "mean", "max", "min", "prod") if dtype in ("float32", "float64") else ("sum", "max", "min")


def drawn_program(plan: Plan, ranks: int) -> tuple[Calls, Calls]:
    """Return 5 to 15 calls, some of which come again and again; and the same with a difference of which ranks must be told."""
    random_ = random.Random(plan.seed)
    few = [draw(random_, ranks, plan.count) for _ in range(random_.randint(2, 6))]
    length = random_.randint(5, 15)
    usual = [random_.choice(few) if random_.random() < 0.5 else draw(random_, ranks, plan.count) for _ in range(length)]
    while True:
        odd = with_difference(random_, usual, random_.choice(DIFFERENCES), ranks, plan.count)
        if odd != usual and outcomes(usual, odd) == TOLD:
            return usual, odd


def with_difference(random_: random.Random, usual: Calls, what: str, ranks: int, most: int) -> Calls:
    """Return what some ranks call instead, or the same where a call cannot differ in that."""
    where = random_.randrange(len(usual))
    call = usual[where]
    if what in ARGUMENTS:
        if call.verb not in _TAKES.get(what, VERBS) or call.verb == "barrier":
            return usual
        [other] = random_.choice([*ARGUMENTS[what].values()])([call])
        return [*usual[:where], other, *usual[where + 1 :]]
    if what in ORDERS:
        return ORDERS[what](where)(usual)
    other = draw(random_, ranks, most)
    return [*usual[:where], other, *usual[where + (what == "verb") :]]


def drawn_pair(plan: Plan, ranks: int) -> tuple[Calls, Calls]:
    """Return two calls that have nothing to do with each other; most go through shared memory."""
    random_ = random.Random(plan.seed)
    usual, odd = (draw(random_, ranks, plan.count, _PAIRED, max(plan.count // 50, 1)) for _ in range(2))
    return [usual], [odd if random_.random() < 0.9 else usual]


# How the calls of these are drawn, and what all ranks do before in a warm case.
DRAWN: dict[str, tuple[Callable[[Plan, int], tuple[Calls, Calls]], str]] = {
    "drawn_program": (drawn_program, "usual"),
    "drawn_pair": (drawn_pair, "both"),
}
