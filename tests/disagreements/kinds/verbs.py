"""One rank makes another call where the others make an all_reduce, or the other way round."""

from __future__ import annotations

from collections.abc import Callable

from tests.disagreements.case import Case
from tests.disagreements.kinds.registry import LARGE, MAY_BE_RIGHT, kind


def _instead(case: Case, call: Callable[[], None]) -> None:
    """Make a call on the odd rank, and all_reduce on the others; in rounds without an odd rank both on all."""
    if case.odd is None:
        case.all_reduce("sum", case.operand())
        call()
    elif case.is_odd:
        call()
    else:
        case.all_reduce("sum", case.operand())


@kind("verb", sizes=LARGE)
def all_gather(case: Case) -> None:
    """One rank calls all_gather, the others all_reduce."""
    _instead(case, lambda: case.all_gather(case.operand()))


@kind("verb")
def broadcast(case: Case) -> None:
    """One rank calls broadcast, the others all_reduce."""
    _instead(case, lambda: case.broadcast(case.operand()))


@kind("verb")
def broadcast_from_itself(case: Case) -> None:
    """One rank broadcasts from itself, the others call all_reduce."""
    _instead(case, lambda: case.broadcast(case.operand(), case.rank if case.is_odd else 0))


@kind("verb")
def gather(case: Case) -> None:
    """One rank calls strategy.gather, the others all_reduce."""
    _instead(case, lambda: case.gather(case.operand()))


@kind("verb")
def barrier(case: Case) -> None:
    """One rank waits in a barrier, the others call all_reduce."""
    _instead(case, case.barrier)


@kind("verb")
def reduce_scatter(case: Case) -> None:
    """One rank calls reduce_scatter, the others all_reduce."""
    _instead(case, lambda: case.reduce_scatter("sum", case.operand()))


@kind("verb")
def all_to_all(case: Case) -> None:
    """One rank calls all_to_all, the others all_reduce."""
    _instead(case, lambda: case.all_to_all(case.operand()))


@kind("verb", allowed=MAY_BE_RIGHT)
def strategy_reduce(case: Case) -> None:
    """One rank calls strategy.reduce, the others all_reduce, with the same arrays."""
    _instead(case, lambda: case.reduce("sum", case.operand()))


@kind("verb")
def gather_and_broadcast(case: Case) -> None:
    """One rank calls broadcast, the others all_gather."""
    if case.is_odd:
        case.broadcast(case.operand())
    else:
        case.all_gather(case.operand())


@kind("verb")
def scatter_and_gather(case: Case) -> None:
    """One rank calls all_gather, the others reduce_scatter."""
    if case.is_odd:
        case.all_gather(case.operand())
    else:
        case.reduce_scatter("sum", case.operand())


@kind("verb")
def barrier_and_gather(case: Case) -> None:
    """One rank calls all_gather, the others wait in a barrier."""
    if case.is_odd:
        case.all_gather(case.operand())
    else:
        case.barrier()


@kind("verb")
def merge_call_alone(case: Case) -> None:
    """One rank reduces in a merge_call, the others by all_reduce."""
    if not case.is_odd:
        case.all_reduce("max", case.operand())
        return
    array = case.operand()
    result = case.run(lambda context: context.merge_call(lambda strategy, value: strategy.reduce("sum", value, None), (array,)))
    case.look("merge_call", result, case.totals("sum", array))


@kind("verb", allowed=MAY_BE_RIGHT)
def merge_call_more(case: Case) -> None:
    """One rank makes a merge_call that communicates nothing."""
    if case.is_odd:
        case.run(lambda context: context.merge_call(lambda strategy: None))
    case.all_reduce("sum", case.operand())
