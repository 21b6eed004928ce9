"""One rank makes the same calls in another order, one more or one less."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import mpistrat
from tests.disagreements.case import Case
from tests.disagreements.kinds.registry import MAY_BE_RIGHT, kind, legal


def _first(case: Case) -> None:
    case.all_reduce("sum", case.operand())


def _second(case: Case) -> None:
    case.all_reduce("max", case.operand(case.count + 2))


def _third(case: Case) -> None:
    case.all_reduce("sum", case.operand(5, "float32"))


def _calls(case: Case, *calls: object) -> None:
    for call in calls:
        call(case)  # type: ignore[operator]


@kind("order")
def two_swapped(case: Case) -> None:
    """One rank makes two calls in the other order."""
    _calls(case, *case.pick((_first, _second, _third), (_second, _first, _third)))


@kind("order")
def one_left_out(case: Case) -> None:
    """One rank leaves a call out."""
    _calls(case, *case.pick((_first, _second, _third), (_first, _third)))


@kind("order")
def one_too_many(case: Case) -> None:
    """One rank makes a call too many."""
    _calls(case, *case.pick((_first, _second, _third), (_first, _second, _second, _third)))


@kind("order")
def one_of_equal_left_out(case: Case) -> None:
    """One rank makes four equal calls, the others five: nothing differs before the next call."""
    for _ in range(case.pick(5, 4)):
        _first(case)


@kind("order")
def last_left_out(case: Case) -> None:
    """One rank leaves the last call before others out."""
    _calls(case, *case.pick((_third, _first), (_third,)))


@kind("order")
def barrier_left_out(case: Case) -> None:
    """One rank leaves a barrier out."""
    _calls(case, *case.pick((_first, Case.barrier, _third), (_first, _third)))


@kind("order")
def barriers_only(case: Case) -> None:
    """One rank waits in one barrier more."""
    _calls(case, *[Case.barrier] * case.pick(3, 4))


@kind("order", sizes=(1, 20_000))
def thread_before_main(case: Case) -> None:
    """Two equal calls, of the main thread and of another one: one rank makes them in the other order."""
    in_thread = functools.partial(_on_a_thread, case)
    for call in case.pick((_first, in_thread), (in_thread, _first)):
        call(case)


@legal(sizes=(1, 20_000))
def thread_after_main(case: Case) -> None:
    """The main thread and another one take turns, in one order on all ranks."""
    for _ in range(2):
        _first(case)
        _on_a_thread(case)


def _on_a_thread(case: Case, *_: object) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_first, case).result()


@kind("order", allowed=MAY_BE_RIGHT)
def started_not_called(case: Case) -> None:
    """One rank starts what the others call, and waits for it at once."""
    if case.is_odd:
        case.wait(case.start("sum", case.operand()))
    else:
        case.all_reduce("sum", case.operand())


@kind("order")
def started_in_other_order(case: Case) -> None:
    """One rank starts two reductions in the other order."""
    counts = case.pick((case.count, case.count + 2), (case.count + 2, case.count))
    started = [case.start("sum", case.operand(count)) for count in counts]
    for handle in started:
        case.wait(handle)


@kind("order")
def started_longer(case: Case) -> None:
    """One rank starts a longer reduction."""
    case.wait(case.start("sum", case.operand(case.pick(case.count, case.count + max(1, case.count // 5)))))


@kind("order", allowed=MAY_BE_RIGHT)
def started_never_waited(case: Case) -> None:
    """One rank never waits for what it started, as all did."""
    started = case.start("sum", case.operand())
    case.kept.append(started)
    if case.is_odd:
        case.turn += 1  # the next operands are those of the next call all the same
    else:
        case.wait(started)


@kind("order")
def started_more(case: Case) -> None:
    """One rank starts one reduction more than the others."""
    started = [case.start("sum", case.operand()) for _ in range(case.pick(2, 3))]
    for handle in started:
        case.wait(handle)


@legal()
def waited_in_other_order(case: Case) -> None:
    """One rank waits for two reductions in the other order: legal."""
    started = [case.start("sum", case.operand(count)) for count in (case.count, case.count + 2)]
    for handle in case.pick(started, started[::-1]):
        case.wait(handle)


@kind("strategy", sizes=(10, 300_000), allowed={"told", "reported"}, rewarm=False)
def two_strategies_in_other_order(case: Case) -> None:
    """One rank calls two strategies in the other order."""
    other = Case(case.plan, case.rank, case.size, case.memory, mpistrat.MultiWorkerMirroredStrategy())
    case.kept.append(other)
    other.odd = case.odd
    for each in case.pick((case, other), (other, case)):
        each.all_reduce("sum", each.operand())
    case.values += other.values


@kind("strategy", sizes=(10, 300_000), allowed={"told", "reported"}, rewarm=False)
def one_step_of_a_second_strategy_left_out(case: Case) -> None:
    """One rank leaves a call of a second strategy out, and goes on with the first."""
    other = Case(case.plan, case.rank, case.size, case.memory, mpistrat.MultiWorkerMirroredStrategy())
    case.kept.append(other)
    if not case.is_odd:
        other.all_reduce("sum", other.operand())
    case.all_reduce("sum", case.operand())
