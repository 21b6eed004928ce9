"""The behaviour of variables as a table: one row for an operation in a context, one cell for each aggregation.

The array of a variable starts as START. In ``run`` replica r passes r + 6, elsewhere all ranks pass 6, and so they do where an
aggregation of NONE asks for equal values; scatter updates pass it twice, for TOUCHED. A cell says what becomes of an element x
of replica r of n, or what is raised.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import mpistrat
from mpistrat import VariableAggregation, VariableSynchronization
from mpistrat.errors import InvalidArgumentError

START = [9.0, 4.0, 16.0]
TOUCHED = [1, 2]


@dataclass(frozen=True)
class Refused:
    """The exact type of an error, and what its text holds, in this order."""

    kind: type[Exception]
    texts: tuple[str, ...]


Outcome = Callable[[float, int, int], float] | Refused


@dataclass(frozen=True)
class Cell:
    operation: str
    synchronization: VariableSynchronization
    where: str
    aggregation: VariableAggregation
    outcome: Outcome

    def __str__(self) -> str:
        return f"{self.operation}-{self.synchronization.name}-{self.where}-{self.aggregation.name}"


def _sum(n: int) -> float:
    return sum(r + 6.0 for r in range(n))


def _prod(n: int, divisor: float) -> float:
    return math.prod((r + 6.0) / divisor for r in range(n))


def _same(outcome: Outcome) -> tuple[Outcome, ...]:
    return (outcome,) * 4


def _refused(kind: type[Exception], *texts: str) -> Refused:
    return Refused(kind, ("Variable('v', float64 (3,)", *texts))


W, R = VariableSynchronization.ON_WRITE, VariableSynchronization.ON_READ

NEEDS = _refused(
    InvalidArgumentError,
    "has aggregation NONE, so the values of",
    "incorrect:  def step(): variable.",
    "correct:    mpistrat.Variable(…, aggregation=mpistrat.VariableAggregation.MEAN)",
    "correct:    def step(): ctx.update(variable,",
    "outside strategy.run",
)
UNREADABLE = _refused(
    InvalidArgumentError, "has aggregation NONE", "incorrect:  np.asarray(variable)", "correct:    mpistrat.V"
)
SUMMED = _refused(InvalidArgumentError, "outside strategy.run is undefined", "incorrect:", "correct:    def step(): variable.")
NO_SCATTER = _refused(
    NotImplementedError,
    "is not defined for variables that are synchronized ON_READ",
    "incorrect:",
    "correct:    mpistrat.Variable(",
)
COMPARES = _refused(
    NotImplementedError,
    "inside strategy.run needs aggregation ONLY_FIRST_REPLICA or NONE",
    "incorrect:  def step()",
    "correct:",
)
VARIES = _refused(TypeError, "got a per-replica value", "incorrect:  variable.", 'strategy.reduce("mean", strategy.run(fn)')

# what each operation does with 6: outside ``run``, and inside it where all replicas pass the same or only the first one counts
ALONE: dict[str, Callable[[float, int, int], float]] = {
    "read": lambda x, n, r: x,
    "assign": lambda x, n, r: 6,
    "assign_add": lambda x, n, r: x + 6,
    "assign_sub": lambda x, n, r: x - 6,
    "scatter_add": lambda x, n, r: x + 6,
    "scatter_sub": lambda x, n, r: x - 6,
    "scatter_mul": lambda x, n, r: x * 6,
    "scatter_div": lambda x, n, r: x / 6,
    "scatter_min": lambda x, n, r: min(x, 6),
    "scatter_max": lambda x, n, r: max(x, 6),
    "scatter_update": lambda x, n, r: 6,
}
# what each does inside ``run`` to a variable synchronized ON_WRITE, with SUM and with MEAN
COMBINED: dict[str, tuple[Outcome, Outcome]] = {
    "read": (ALONE["read"], ALONE["read"]),
    "assign": (lambda x, n, r: _sum(n), lambda x, n, r: _sum(n) / n),
    "assign_add": (lambda x, n, r: x + _sum(n), lambda x, n, r: x + _sum(n) / n),
    "assign_sub": (lambda x, n, r: x - _sum(n), lambda x, n, r: x - _sum(n) / n),
    "scatter_add": (lambda x, n, r: x + _sum(n), lambda x, n, r: x + _sum(n) / n),
    "scatter_sub": (lambda x, n, r: x - _sum(n), lambda x, n, r: x - _sum(n) / n),
    "scatter_mul": (lambda x, n, r: x * _prod(n, 1), lambda x, n, r: x * _prod(n, n)),
    "scatter_div": (lambda x, n, r: x / _prod(n, 1), lambda x, n, r: x / _prod(n, n)),
    "scatter_min": (COMPARES, COMPARES),
    "scatter_max": (COMPARES, COMPARES),
    "scatter_update": (COMPARES, COMPARES),
}

# fmt: off
TABLE: list[tuple[str, VariableSynchronization, str, tuple[Outcome, ...]]] = [
    # operation, synchronization, where: what it gives with NONE, SUM, MEAN, ONLY_FIRST_REPLICA
    *((operation, W, "run", (ALONE[operation], *combined, ALONE[operation])) for operation, combined in COMBINED.items()),
    *((operation, W, where, _same(alone)) for operation, alone in ALONE.items() for where in ("scope", "update")),

    ("read", R, "run", _same(lambda x, n, r: x)),
    ("read", R, "update", _same(lambda x, n, r: x)),
    ("read", R, "scope", (UNREADABLE, lambda x, n, r: n * x, lambda x, n, r: x, lambda x, n, r: x)),
    ("assign", R, "run", _same(lambda x, n, r: r + 6)),
    ("assign", R, "scope", (lambda x, n, r: 6, lambda x, n, r: 6 / n, lambda x, n, r: 6, lambda x, n, r: 6)),
    ("assign", R, "update", _same(lambda x, n, r: 6)),
    ("assign_add", R, "run", _same(lambda x, n, r: x + r + 6)),
    ("assign_add", R, "scope", (lambda x, n, r: x + 6, SUMMED, lambda x, n, r: x + 6, lambda x, n, r: x + 6)),
    ("assign_add", R, "update", _same(lambda x, n, r: x + 6)),
    ("assign_sub", R, "run", _same(lambda x, n, r: x - r - 6)),
    ("assign_sub", R, "scope", (lambda x, n, r: x - 6, SUMMED, lambda x, n, r: x - 6, lambda x, n, r: x - 6)),
    ("assign_sub", R, "update", _same(lambda x, n, r: x - 6)),
    *(
        (f"scatter_{kind}", R, where, _same(NO_SCATTER))
        for kind in ("add", "sub", "mul", "div", "min", "max", "update")
        for where in ("run", "scope", "update")
    ),
]
# fmt: on

CELLS = [
    Cell(operation, synchronization, where, aggregation, outcome)
    for operation, synchronization, where, outcomes in TABLE
    for aggregation, outcome in zip(VariableAggregation, outcomes, strict=True)
]
METHODS = sorted({cell.operation for cell in CELLS} - {"read"})


def of_central_storage(cell: Cell) -> Cell:
    """Return what a cell says under central storage, where one array cannot be what each replica assigns."""
    is_compared = cell.operation in ("read", "scatter_min", "scatter_max", "scatter_update")
    return replace(cell, outcome=NEEDS) if cell.where == "run" and _is_none(cell) and not is_compared else cell


def of_default_strategy(cell: Cell) -> Cell:
    """Return what a cell says of a variable of the default strategy: a plain array, however declared."""
    return replace(cell, outcome=ALONE[cell.operation])


def made(strategy: Any, *arguments: Any, **keywords: Any) -> Any:
    with strategy.scope():
        return mpistrat.Variable(*arguments, **keywords)


def declared(strategy: Any, synchronization: VariableSynchronization, aggregation: VariableAggregation) -> Any:
    """Return a variable of `strategy` that starts as START."""
    return made(strategy, START, name="v", synchronization=synchronization, aggregation=aggregation)


def check_cells(strategy: Any, cells: Sequence[Cell]) -> None:
    """Check many cells on one strategy, and say which were wrong: making one for each would take longer than all of them."""
    failures = []
    for cell in cells:
        try:
            check_cell(strategy, cell)
        except (Exception, pytest.fail.Exception) as error:
            failures.append(f"{cell}: {error!r}")
    assert not failures, "\n".join(failures)


def check_cell(strategy: Any, cell: Cell) -> None:
    """Do what a cell says, and compare the array of this replica, and what is read in all contexts."""
    size, rank = strategy.num_replicas_in_sync, strategy.extended.communicator.rank
    variable = declared(strategy, cell.synchronization, cell.aggregation)
    is_own = cell.where == "run" and not (cell.synchronization is W and _is_none(cell))
    number = 6.0 + rank if is_own else 6.0

    def act() -> Any:
        return variable.numpy() if cell.operation == "read" else _apply(variable, cell.operation, number)

    if isinstance(cell.outcome, Refused):
        check_refused(cell.outcome, lambda: _perform(strategy, variable, cell.where, act))
        check_arrays(strategy, variable, lambda replica: START)
        return
    outcome = cell.outcome

    def expected(replica: int) -> list[float]:
        touched = TOUCHED if cell.operation.startswith("scatter") else range(3)
        return [outcome(x, size, replica) if index in touched else x for index, x in enumerate(START)]

    result = _perform(strategy, variable, cell.where, act)
    if cell.operation == "read":
        np.testing.assert_allclose(result, expected(rank), rtol=1e-14)
        check_arrays(strategy, variable, lambda replica: START)
    else:
        assert result is variable
        check_arrays(strategy, variable, expected)


def check_refused(refused: Refused, act: Callable[[], Any]) -> None:
    """Check the exact type of what is raised, and that its text holds all that it must, in order."""
    with pytest.raises(refused.kind) as caught:
        act()
    assert caught.type is refused.kind
    text, position = str(caught.value), 0
    for part in refused.texts:
        assert part in text[position:], (part, text)
        position = text.index(part, position) + len(part)


def check_arrays(strategy: Any, variable: Any, expected: Callable[[int], list[float]]) -> None:
    """Compare what this replica holds, and what is read outside ``run``, with what each replica should hold."""
    size, rank = strategy.num_replicas_in_sync, strategy.extended.communicator.rank
    held = strategy.experimental_local_results(strategy.run(variable.numpy))[0]
    np.testing.assert_allclose(held, expected(rank), rtol=1e-12)
    arrays = np.array([expected(replica) for replica in range(size)])
    if variable.synchronization is VariableSynchronization.ON_WRITE or strategy is mpistrat.get_strategy():
        np.testing.assert_allclose(variable.numpy(), arrays[0], rtol=1e-12)
    elif variable.aggregation is VariableAggregation.NONE:
        check_refused(UNREADABLE, variable.numpy)
        assert len(variable) == len(START)
    else:
        combined = dict(zip(VariableAggregation, (None, arrays.sum(axis=0), arrays.mean(axis=0), arrays[0]), strict=True))
        np.testing.assert_allclose(variable.numpy(), combined[variable.aggregation], rtol=1e-12)


def check_per_replica(strategy: Any, method: str, synchronization: VariableSynchronization, where: str) -> None:
    """Check that outside an update a mirrored variable takes the component of this replica, and that all else is refused."""
    variable = declared(strategy, synchronization, VariableAggregation.SUM)
    is_scatter = method.startswith("scatter")
    value = mpistrat.PerReplica(mpistrat.IndexedSlices([6.0] * len(TOUCHED), TOUCHED) if is_scatter else np.full(3, 6.0))
    changed: Sequence[int] = ()
    if where == "scope" and synchronization is VariableSynchronization.ON_WRITE:
        getattr(variable, method)(value)
        changed = TOUCHED if is_scatter else range(3)
    else:
        check_refused(VARIES, lambda: _perform(strategy, variable, where, lambda: getattr(variable, method)(value)))
    wanted = [ALONE[method](x, 1, 0) if i in changed else x for i, x in enumerate(START)]
    check_arrays(strategy, variable, lambda replica: wanted)


def _is_none(cell: Cell) -> bool:
    return cell.aggregation is VariableAggregation.NONE


def _apply(variable: Any, method: str, number: float) -> Any:
    if method.startswith("scatter"):
        return getattr(variable, method)(mpistrat.IndexedSlices([number] * len(TOUCHED), TOUCHED))
    return getattr(variable, method)(np.full(3, number))


def _perform(strategy: Any, variable: Any, where: str, act: Callable[[], Any]) -> Any:
    if where == "run":
        result = strategy.run(act)
        return result if result is variable else strategy.experimental_local_results(result)[0]
    with strategy.scope():
        return act() if where == "scope" else strategy.extended.update(variable, lambda _: act(), group=False)[0]
