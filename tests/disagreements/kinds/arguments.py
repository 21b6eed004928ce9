"""One rank passes another operation, axis or root to the same call."""

from __future__ import annotations

from tests.disagreements.case import Case
from tests.disagreements.kinds.registry import LARGE, MAY_BE_RIGHT, kind


@kind("operation", sizes=LARGE)
def op_max(case: Case) -> None:
    """One rank asks for the largest, the others for the sum."""
    case.all_reduce(case.pick("sum", "max"), case.operand())


@kind("operation")
def op_mean(case: Case) -> None:
    """One rank asks for the mean, the others for the sum."""
    case.all_reduce(case.pick("sum", "mean"), case.operand())


@kind("operation")
def op_prod(case: Case) -> None:
    """One rank asks for the product, the others for the sum."""
    case.all_reduce(case.pick("sum", "prod"), case.operand())


@kind("operation")
def op_min_max(case: Case) -> None:
    """One rank asks for the least, the others for the largest, of float32."""
    case.all_reduce(case.pick("max", "min"), case.operand(dtype="float32"))


@kind("operation")
def op_unknown(case: Case) -> None:
    """One rank asks for an operation that there is not."""
    case.run(lambda context: context.all_reduce(case.pick("sum", "average"), case.operand()))
    case.turn += 1


@kind("operation", allowed=MAY_BE_RIGHT)
def weighted(case: Case) -> None:
    """One rank passes a weight to a mean."""
    case.all_reduce("mean", case.operand(), **case.pick({}, {"weight": 1.0}))


@kind("operation")
def op_of_scatter(case: Case) -> None:
    """One rank asks reduce_scatter for the largest, the others for the sum."""
    case.reduce_scatter(case.pick("sum", "max"), case.operand((case.count, 4)))


@kind("axis")
def gather_axis(case: Case) -> None:
    """One rank gathers along another axis."""
    case.all_gather(case.operand((case.count, 2)), case.pick(0, 1))


@kind("axis")
def gather_axis_of_square(case: Case) -> None:
    """One rank gathers a square array along another axis: as many elements come back."""
    side = max(int(case.count**0.5), 1)
    case.all_gather(case.operand((side, side)), case.pick(0, 1))


@kind("axis")
def gather_number_of_axes(case: Case) -> None:
    """One rank gathers an array with an axis more."""
    case.all_gather(case.operand(case.pick((case.count,), (case.count, 1))))


@kind("axis")
def gather_extents(case: Case) -> None:
    """One rank gathers an array that differs in another axis than that along which it is gathered."""
    case.all_gather(case.operand((case.count, case.pick(2, 3))))


@kind("dtype")
def gather_dtype(case: Case) -> None:
    """One rank gathers another dtype of the same size."""
    case.all_gather(case.operand(dtype=case.pick("float32", "int32")))


@kind("axis")
def scatter_axis(case: Case) -> None:
    """One rank scatters along another axis."""
    case.reduce_scatter("sum", case.operand((2 * case.count, 8)), case.pick(0, 1))


@kind("length")
def scatter_length(case: Case) -> None:
    """One rank passes a longer array to reduce_scatter."""
    case.reduce_scatter("sum", case.operand(case.pick(case.count, case.count + max(1, case.count // 5))))


@kind("axis")
def reduce_axis(case: Case) -> None:
    """One rank reduces over an axis of its own values first."""
    case.reduce("sum", case.operand((case.count, 2)), case.pick(None, 0))


@kind("root")
def broadcast_root(case: Case) -> None:
    """One rank names another root."""
    case.broadcast(case.operand(), case.pick(0, 1))


@kind("dtype")
def all_to_all_dtype(case: Case) -> None:
    """One rank sends another dtype of the same size in all_to_all."""
    case.all_to_all(case.operand(dtype=case.pick("float32", "int32")))


@kind("length")
def all_to_all_too_few(case: Case) -> None:
    """One rank has an array too few in all_to_all."""
    array = case.operand()
    case.run(lambda context: context.all_to_all([array] * (case.size - case.is_odd)))
    case.turn += 1
