"""Signatures of calls, drawn from a seed: all ranks draw the same, and one draws what it does otherwise."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

from tests.disagreements.case import Case

DTYPES = ("float32", "float64", "int32", "int64", "float16", "bfloat16", "int8", "uint8")
OPS = ("sum", "mean", "max", "min", "prod")
DIFFERENCES = ("op", "dtype", "shape", "verb", "order", "left out", "added")
VERBS = ("all_reduce",) * 5 + ("start", "reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "barrier")


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a rank calls, with what."""

    verb: str
    op: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    place: int = 0  # the axis or the root


def draw(random_: random.Random, ranks: int, most: int, verbs: Sequence[str] = VERBS, least: int = 1) -> Signature:
    """Return a signature of at most, and about at least, so many elements."""
    verb = random_.choice(verbs)
    if verb == "barrier":
        return Signature(verb)
    dtype, shape = random_.choice(DTYPES), _shape(random_, most, least)
    reduces = verb in ("all_reduce", "start", "reduce", "reduce_scatter")
    op = random_.choice(_ops(dtype)) if reduces else ""
    place = 0
    if verb in ("all_gather", "reduce_scatter"):
        shape = shape or (1,)
        place = random_.randrange(len(shape))
    if verb == "broadcast":
        place = random_.randrange(ranks)
    return Signature(verb, op, dtype, shape, place)


def draw_program(random_: random.Random, ranks: int, most: int) -> list[Signature]:
    """Return 5 to 15 signatures, some of which come again and again."""
    few = [draw(random_, ranks, most) for _ in range(random_.randint(2, 6))]
    length = random_.randint(5, 15)
    return [random_.choice(few) if random_.random() < 0.5 else draw(random_, ranks, most) for _ in range(length)]


def with_disagreement(random_: random.Random, calls: list[Signature], ranks: int, most: int) -> tuple[str, list[Signature]]:
    """Return what one rank does instead, and in a word what differs. It differs in a signature, or in how many there are."""
    while True:
        where, what = random_.randrange(len(calls)), random_.choice(DIFFERENCES)
        odd = list(calls)
        if what == "left out":
            del odd[where]
        elif what == "added":
            odd.insert(where, random_.choice([calls[where], draw(random_, ranks, most)]))
        elif what == "order":
            other = random_.randrange(len(calls))
            odd[where], odd[other] = odd[other], odd[where]
        else:
            odd[where] = other_than(random_, calls[where], what, ranks, most)
        if odd != calls:
            return f"{what} at {where} of {len(calls)}: {calls[where]}", odd


def other_than(random_: random.Random, call: Signature, what: str, ranks: int, most: int) -> Signature:
    """Return a signature that differs in one respect, or the same where that cannot be."""
    if what == "verb":
        verb = random_.choice(sorted(set(VERBS) - {call.verb}))
        return draw(random_, ranks, most, (verb,))
    if call.verb == "barrier":
        return call
    if what == "op" and call.op:
        return dataclasses.replace(call, op=random_.choice(_ops(call.dtype)))
    if call.verb == "broadcast":  # dtype and shape of a rank that receives do not count
        return dataclasses.replace(call, place=(call.place + 1) % ranks)
    if what == "dtype":
        dtype = random_.choice(DTYPES)
        return dataclasses.replace(call, dtype=dtype, op=call.op if call.op in _ops(dtype) else "sum" if call.op else "")
    if what == "shape" and call.verb == "all_to_all":
        return dataclasses.replace(call, shape=(*call.shape, 2))
    if what == "shape" and call.verb == "all_gather":  # the extent of that axis may differ
        return dataclasses.replace(call, shape=(*call.shape, 2))
    if what == "shape":
        shape = _shape(random_, most)
        return dataclasses.replace(call, shape=shape if len(shape) > call.place else call.shape)
    return call


def make(case: Case, call: Signature) -> None:
    """Make a call, and look at its result."""
    _MAKERS[call.verb](case, call)


def _shape(random_: random.Random, most: int, least: int = 1) -> tuple[int, ...]:
    count = int(2 ** random_.uniform(math.log2(least), math.log2(most)))
    axes = random_.choice((0, 1, 1, 1, 2, 2, 3)) if count < 3 else random_.choice((1, 1, 1, 2, 2, 3))
    shape = [random_.randint(1, max(int(count ** (1 / axes)), 1)) for _ in range(axes - 1)]
    return (*shape, max(count // math.prod(shape), 1)) if axes else ()


def _ops(dtype: str) -> tuple[str, ...]:
    # products of what a case holds leave the range of small types, means of integers are cut, and bfloat16 has eight bits
    return OPS if dtype in ("float32", "float64") else ("sum", "max", "min")


_MAKERS: dict[str, Callable[[Case, Signature], None]] = {
    "all_reduce": lambda case, call: case.all_reduce(call.op, case.operand(call.shape, call.dtype)),
    "start": lambda case, call: case.wait(case.start(call.op, case.operand(call.shape, call.dtype))),
    "reduce": lambda case, call: case.reduce(call.op, case.operand(call.shape, call.dtype)),
    "all_gather": lambda case, call: case.all_gather(case.operand(call.shape, call.dtype), call.place),
    "broadcast": lambda case, call: case.broadcast(case.operand(call.shape, call.dtype), call.place),
    "reduce_scatter": lambda case, call: case.reduce_scatter(call.op, case.operand(call.shape, call.dtype), call.place),
    "all_to_all": lambda case, call: case.all_to_all(case.operand(call.shape, call.dtype)),
    "barrier": lambda case, call: case.barrier(),
}
