"""Programs and pairs of calls that are drawn from a seed; not among the cases of every kind, but run by the thousand."""

from __future__ import annotations

import random

from tests.disagreements.case import Case
from tests.disagreements.kinds.registry import kind
from tests.disagreements.signatures import draw, draw_program, make, with_disagreement

_MAY_DIFFER = ("all_gather", "broadcast", "barrier")  # in some shapes; and barriers are all alike
_PAIRED = ("all_reduce",) * 6 + ("reduce", "all_gather", "broadcast", "reduce_scatter", "barrier")


@kind("drawn", sizes=())
def drawn_program(case: Case) -> None:
    """A random program of 5 to 15 calls, in which one rank differs in one place."""
    random_ = random.Random(case.seed)
    calls = draw_program(random_, case.size, case.count)
    what, odd = with_disagreement(random_, calls, case.size, case.count)
    case.note(what)
    for call in case.pick(calls, odd):
        make(case, call)


@kind("drawn", sizes=(), rewarm=False, allowed={"right", "told"})
def drawn_pair(case: Case) -> None:
    """One rank makes a random call, and the others another one, after both were made by all."""
    random_ = random.Random(case.seed)
    least = max(case.count // 50, 1)  # most go through shared memory
    usual = odd = draw(random_, case.size, case.count, _PAIRED, least)
    if random_.random() < 0.9:
        while odd.verb == usual.verb and (odd == usual or odd.verb in _MAY_DIFFER):
            odd = draw(random_, case.size, case.count, _PAIRED, least)
    case.must_be_told = odd != usual
    case.note(f"{usual} and {odd}")
    if case.plan.warm:
        case.in_step(lambda: [make(case, call) for call in (usual, odd)])
    make(case, case.pick(usual, odd))
