"""What ranks may do differently: the result must be right on all of them."""

from __future__ import annotations

import numpy as np

import mpistrat
from mpistrat.reduction import ReduceOp
from tests.disagreements.case import Case
from tests.disagreements.kinds.registry import LARGE, legal


@legal(sizes=LARGE)
def out_alone(case: Case) -> None:
    """One rank has the result in memory of its own."""
    operand = case.operand()
    expected = case.totals("sum", operand)
    target = case.memory.array(case.count, "float64") if case.odd is None or case.is_odd else None
    communicator = case.strategy.extended.communicator
    [total] = communicator.all_reduce(ReduceOp.SUM, [operand], out=None if target is None else [target])
    case.look("all_reduce out", total if target is None else target, expected)


@legal(sizes=LARGE)
def nothing_differs(case: Case) -> None:
    """No rank does anything else."""
    case.all_reduce("sum", case.operand())
    case.all_reduce("mean", {"a": case.operand(7, "float32"), "b": case.operand((3, 2), "float32")})


@legal()
def communicator_and_context(case: Case) -> None:
    """One rank reduces an array by the strategy's communicator, the others by the replica context: the same call."""
    operand = case.operand()
    if case.is_odd:
        expected = case.totals("sum", operand)
        case.look("all_reduce", case.strategy.communicator.all_reduce("sum", operand), expected)
    else:
        case.all_reduce("sum", operand)


@legal()
def not_contiguous(case: Case) -> None:
    """One rank's array is every second element of a larger one."""
    array = case.memory.array(2 * case.count, "float64")[::2]
    case.fill(array)
    case.all_reduce("sum", case.pick(array, array) if case.is_odd or case.odd is None else array.copy())


@legal(sizes=(1, 10, 300_000))
def not_aligned(case: Case) -> None:
    """One rank's array begins at an odd address."""
    case.all_reduce("sum", case.operand(misaligned=1) if case.is_odd else case.operand())


@legal(sizes=(1, 10, 300_000))
def read_only(case: Case) -> None:
    """One rank's array cannot be written to."""
    array = case.operand()
    array.flags.writeable = not case.is_odd
    case.all_reduce("sum", array)


@legal(sizes=(1,))
def python_number(case: Case) -> None:
    """One rank passes a number, the others an array without axes."""
    array = case.operand(())
    expected = case.totals("sum", array)
    result = case.run(lambda context: context.all_reduce("sum", case.pick(array, float(array))))
    case.look("all_reduce", np.asarray(result), expected)


@legal()
def rows_differ(case: Case) -> None:
    """Ranks gather different numbers of rows."""
    array = case.operand((case.count + 3 * case.is_odd, 2))
    result = case.run(lambda context: context.all_gather(array, 0))
    parts = [case.component(rank, (case.count + 3 * (rank == case.odd), 2), array.dtype) for rank in range(case.size)]
    case.look("all_gather", result, lambda: np.concatenate(parts))


@legal()
def shape_of_others_in_broadcast(case: Case) -> None:
    """A rank that only receives passes an array of another shape and dtype."""
    root = 0 if case.odd is None else (case.odd + 1) % case.size
    array = case.operand(case.count + 3, "int8") if case.is_odd else case.operand()
    result = case.run(lambda context: context.broadcast(array, root))
    case.look("broadcast", result, lambda: case.component(root, case.count, np.float64))


@legal(sizes=(10, 20_000))
def late_by_a_little(case: Case) -> None:
    """One rank comes half a second late."""
    import time

    if case.is_odd:
        time.sleep(0.5)
    case.all_reduce("sum", case.operand())


@legal(sizes=(10,), rewarm=False)
def data_ends_early(case: Case) -> None:
    """One rank's generator of batches ends before the others'."""

    def batches() -> object:
        for number in range(case.pick(6, 4)):
            yield np.full(2, float(number))

    dataset = case.strategy.distribute_datasets_from_function(lambda context: batches())
    rows = 0
    for batch in dataset:
        total = case.run(lambda context, batch=batch: context.all_reduce("sum", np.float64(len(batch.values[0]))))
        rows += int(total)
    # every row of every rank, once
    usual, odd = 6 * 2, 4 * 2 if case.odd is not None else 6 * 2
    case.look("rows", np.asarray(rows), lambda: np.asarray(usual * (case.size - 1) + odd))


@legal(sizes=(10, 300_000), rewarm=False)
def second_strategy(case: Case) -> None:
    """All ranks use a second strategy, and one makes calls that stay on the rank between."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    other = Case(case.plan, case.rank, case.size, case.memory, strategy)
    other.odd = case.odd
    for _ in range(3):
        case.all_reduce("sum", case.operand())
        if case.is_odd:
            strategy.explain(np.ones(3))
        other.all_reduce("sum", other.operand())
    case.values += other.values
    strategy.close()
