"""What some ranks do to the calls that the others make, also as drawn from a seed; and how it may end, by what differs."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.disagreements.calls import LOCAL, Call
from tests.disagreements.case import Plan

Calls = list[Call]
Deviation = Callable[[Calls], Calls]

RIGHT, TOLD, REPORTED = frozenset({"right"}), frozenset({"told"}), frozenset({"reported"})
MAY_BE_RIGHT = RIGHT | TOLD  # ranks differ in what need not change a result
TOLD_OR_REPORTED = TOLD | REPORTED


def change(index: int = 0, **arguments: Any) -> Deviation:
    """Return a deviation that changes arguments of a call; a function is given the argument that others pass."""

    def deviate(calls: Calls) -> Calls:
        call = calls[index]
        changed = {name: value(getattr(call, name)) if callable(value) else value for name, value in arguments.items()}
        return [*calls[:index], replace(call, **changed), *calls[index + 1 :]]

    return deviate


def insert(index: int, *more: Call) -> Deviation:
    return lambda calls: [*calls[:index], *more, *calls[index:]]


# by what is done with a call, and with the next one: of an index, which may be that of no call
ORDERS: dict[str, Callable[[int], Deviation]] = {
    "without": lambda index: lambda calls: [*calls[:index], *calls[index + 1 :]],
    "twice": lambda index: lambda calls: [*calls[:index], *calls[index : index + 1] * 2, *calls[index + 1 :]],
    "swapped": lambda index: lambda calls: [*calls[:index], *calls[index : index + 2][::-1], *calls[index + 2 :]],
}
_SAME_WIDTH = {"float64": "int64", "float32": "int32", "float16": "bfloat16", "int8": "uint8"}
_OTHER_WIDTH = {"float64": "float32", "float32": "float64", "int8": "int16"}
# by argument, what a call may be given instead; which leaves some calls as they are
ARGUMENTS: dict[str, dict[str, Deviation]] = {
    "shape": {
        "shorter": change(shape=lambda shape: (*(extent - max(1, extent // 5) for extent in shape[:1]), *shape[1:])),
        "longer": change(shape=lambda shape: (*(extent + max(1, extent // 5) for extent in shape[:1]), *shape[1:])),
        "longer_by_one": change(shape=lambda shape: (*(extent + 1 for extent in shape[:1]), *shape[1:])),
        "twice_as_long": change(shape=lambda shape: (*(2 * extent for extent in shape[:1]), *shape[1:])),
        "empty": change(shape=lambda shape: (0, *shape[1:])),
        "wider": change(shape=lambda shape: (*shape[:1], *(extent + 1 for extent in shape[1:]))),
        "transposed": change(shape=lambda shape: shape[::-1]),
        "one_axis_more": change(shape=lambda shape: (*shape, 1)),
    },
    "dtype": {
        "dtype_of_same_width": change(dtype=lambda dtype: _SAME_WIDTH.get(dtype, dtype)),
        "dtype_of_other_width": change(dtype=lambda dtype: _OTHER_WIDTH.get(dtype, dtype)),
        "dtype_of_same_bytes": lambda calls: (
            change(dtype="float32", shape=lambda shape: (*shape[:-1], 2 * shape[-1]))(calls)
            if calls[0].dtype == "float64" and calls[0].shape
            else calls
        ),
    },
    "op": {f"op_{op}": change(op=op) for op in ("sum", "max", "min", "mean", "prod", "unknown")},
    "place": {"place": change(place=lambda place: 1 if place == 0 else 0)},
    "layout": {f"layout_{layout}": change(layout=layout) for layout in ("strided", "misaligned", "read_only", "big_endian")},
    "thread": {"on_a_thread": change(is_on_thread=True)},
}

# Calls of these verbs are the same to other ranks, or may be.
_SAME = {"all_reduce", "into", "of_communicator"}
_ALIKE = (_SAME | {"started", "weighted", "reduce"}, {"all_gather", "gather"})


def outcomes(usual: Calls, odd: Calls) -> frozenset[str]:
    """Return how a case may end in which some ranks make the usual calls, and some make odd ones."""
    ours, theirs = ([call for call in calls if call.verb not in LOCAL] for calls in (usual, odd))
    if len(ours) != len(theirs):
        return TOLD_OR_REPORTED if any(call.verb == "strategy" for call in usual + odd) else TOLD
    found = [_outcomes_of(*pair) for pair in zip(ours, theirs, strict=True)]
    return next(kind for kind in (TOLD_OR_REPORTED, TOLD, MAY_BE_RIGHT, RIGHT) if kind is RIGHT or kind in found)


def _outcomes_of(usual: Call, odd: Call) -> frozenset[str]:
    verbs, one, other = {usual.verb, odd.verb}, _compared(usual), _compared(odd)
    differ = {name for name in vars(usual) if getattr(one, name) != getattr(other, name)}
    if differ - {"verb", "options", "layout"} or not any(verbs <= alike for alike in ({usual.verb}, *_ALIKE)):
        return TOLD_OR_REPORTED if "strategy" in differ else TOLD
    return RIGHT if not differ or (differ == {"verb"} and verbs <= _SAME) else MAY_BE_RIGHT


def _compared(call: Call) -> Call:
    """Return a call without that in which ranks may differ."""
    call = replace(call, layout="big_endian" if call.layout == "big_endian" else "")
    if call.verb in ("broadcast", "feed"):  # what is received has the shape and dtype of the root
        return replace(call, shape=(), dtype="")
    if call.verb in ("all_gather", "gather", "all_to_all") and call.shape:
        axis = 0 if call.verb == "all_to_all" else call.place or 0
        return replace(call, shape=(*call.shape[:axis], -1, *call.shape[axis + 1 :]))
    return call


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
