"""One rank makes or changes another variable, or another strategy."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpistrat
from tests.disagreements.case import Case
from tests.disagreements.kinds.registry import kind

SUM, MEAN = mpistrat.VariableAggregation.SUM, mpistrat.VariableAggregation.MEAN
_SIZES = (1, 10, 20_000, 300_000)


@kind("variable", sizes=_SIZES)
def variable_alone(case: Case) -> None:
    """One rank makes a variable, the others none."""
    if case.is_odd:
        case.variable(case.operand())
    case.all_reduce("sum", case.operand())


@kind("variable", sizes=_SIZES)
def variable_missing(case: Case) -> None:
    """All but one rank make a variable."""
    if not case.is_odd:
        case.variable(case.operand())
    case.all_reduce("sum", case.operand())


@kind("variable", sizes=_SIZES)
def variables_in_other_order(case: Case) -> None:
    """One rank makes two variables of different shapes in the other order."""
    for count in case.pick((case.count, case.count + 2), (case.count + 2, case.count)):
        case.variable(case.operand(count))


@kind("variable", sizes=_SIZES)
def variable_shape(case: Case) -> None:
    """One rank's variable is longer."""
    case.variable(case.operand(case.pick(case.count, case.count + max(1, case.count // 5))))


@kind("variable", sizes=_SIZES)
def variable_dtype(case: Case) -> None:
    """One rank's variable has another dtype of the same size."""
    case.variable(case.operand(dtype=case.pick("float32", "int32")))


@kind("variable", sizes=_SIZES)
def variable_aggregation(case: Case) -> None:
    """One rank's variable has another aggregation, and all assign to it."""
    made = case.variable(case.operand(), aggregation=case.pick(SUM, MEAN))
    _assign(case, made, "assign", made)


@kind("variable", sizes=_SIZES)
def assigned_alone(case: Case) -> None:
    """One rank assigns to a variable with an aggregation, the others go on."""
    made = case.variable(case.operand(), aggregation=SUM)
    if case.is_odd:
        _assign(case, made, "assign", made)
    case.all_reduce("sum", case.operand())


@kind("variable", sizes=_SIZES)
def assigned_otherwise(case: Case) -> None:
    """One rank assigns to another of two equal variables."""
    first, second = (case.variable(case.operand(), aggregation=SUM, name=name) for name in "ab")
    operand = case.operand()
    expected = case.totals("sum", operand)
    case.run(lambda context: case.pick(first, second).assign(operand))
    case.look("assign", first.numpy(), expected)


@kind("variable", sizes=_SIZES)
def added_and_assigned(case: Case) -> None:
    """One rank adds to a variable with an aggregation, the others assign to it."""
    made = case.variable(case.operand(), aggregation=SUM)
    _assign(case, made, case.pick("assign", "assign_add"), made)


@kind("variable", sizes=_SIZES)
def read_alone(case: Case) -> None:
    """One rank reads a variable that is brought together on reading."""
    on_read = mpistrat.VariableSynchronization.ON_READ
    made = case.variable(case.operand(), aggregation=SUM, synchronization=on_read)
    if case.odd is None or case.is_odd:
        made.numpy()
    case.all_reduce("sum", case.operand())


def _assign(case: Case, made: Any, method: str, like: Any) -> None:
    operand = case.operand(like.shape)
    expected = case.totals("sum", operand)
    case.run(lambda context: getattr(made, method)(operand))
    case.look(method, np.array(made.numpy()), expected)


@kind("strategy", sizes=(10, 300_000), allowed={"told", "reported"}, rewarm=False)
def strategy_alone(case: Case) -> None:
    """One rank makes a second strategy, the others go on with the first."""
    if case.is_odd:
        case.kept.append(mpistrat.MultiWorkerMirroredStrategy())
    case.all_reduce("sum", case.operand())


@kind("strategy", sizes=(10, 300_000), allowed={"told", "reported"}, rewarm=False)
def strategy_missing(case: Case) -> None:
    """All ranks but one make a second strategy."""
    if not case.is_odd:
        case.kept.append(mpistrat.MultiWorkerMirroredStrategy())
    case.all_reduce("sum", case.operand())


@kind("strategy", sizes=(10,), rewarm=False)
def other_strategy(case: Case) -> None:
    """One rank makes a MirroredStrategy, the others a MultiWorkerMirroredStrategy."""
    make: Any = case.pick(mpistrat.MultiWorkerMirroredStrategy, mpistrat.MirroredStrategy)
    case.kept.append(make())


@kind("strategy", sizes=(10, 300_000), rewarm=False)
def closed_alone(case: Case) -> None:
    """One rank closes the strategy, the others go on."""
    if case.is_odd:
        case.strategy.close()
    else:
        case.all_reduce("sum", case.operand())
