"""One rank passes other options to a call or to its strategy."""

from __future__ import annotations

from typing import Any

import mpistrat
from mpistrat.experimental import CommunicationOptions
from tests.disagreements.case import Case
from tests.disagreements.kinds.registry import MAY_BE_RIGHT, kind


def _options(case: Case, usual: CommunicationOptions | None, dtype: str = "float32", **odd: Any) -> None:
    case.all_reduce("sum", case.operand(dtype=dtype), options=case.pick(usual, CommunicationOptions(**odd)))


@kind("options", allowed=MAY_BE_RIGHT)
def algorithm(case: Case) -> None:
    """One rank names another algorithm."""
    _options(case, CommunicationOptions(algorithm="flat"), algorithm="hierarchical")


@kind("options", allowed=MAY_BE_RIGHT)
def algorithm_alone(case: Case) -> None:
    """One rank names an algorithm, the others none."""
    _options(case, None, algorithm="hierarchical")


@kind("options", allowed=MAY_BE_RIGHT)
def algorithm_of_scatter(case: Case) -> None:
    """One rank asks for an all-reduce of which each rank takes its part, the others for a reduce-scatter."""
    options = case.pick(CommunicationOptions(algorithm="hierarchical"), CommunicationOptions(algorithm="flat"))
    case.reduce_scatter("sum", case.operand(), options=options)


@kind("options", allowed=MAY_BE_RIGHT)
def deterministic_scatter(case: Case) -> None:
    """One rank wants its part of a sum in the order of the ranks."""
    case.reduce_scatter("sum", case.operand(), options=case.pick(None, CommunicationOptions(deterministic=True)))


@kind("options", allowed=MAY_BE_RIGHT)
def wire_dtype(case: Case) -> None:
    """One rank wants bfloat16 between nodes."""
    _options(case, None, wire_dtype="bfloat16")


@kind("options", allowed=MAY_BE_RIGHT)
def wire_dtypes(case: Case) -> None:
    """One rank wants float16 between nodes, the others bfloat16, by an algorithm that has a wire."""
    _options(
        case,
        CommunicationOptions(wire_dtype="bfloat16", algorithm="hierarchical"),
        wire_dtype="float16",
        algorithm="hierarchical",
    )


@kind("options", allowed=MAY_BE_RIGHT)
def bytes_per_pack(case: Case) -> None:
    """One rank cuts five arrays into packs of another size."""
    options = case.pick(CommunicationOptions(bytes_per_pack=1 << 20), CommunicationOptions(bytes_per_pack=4096))
    case.all_reduce("sum", [case.operand(max(case.count // 5, 1), "float32") for _ in range(5)], options=options)


@kind("options", allowed=MAY_BE_RIGHT)
def deterministic(case: Case) -> None:
    """One rank wants the order of the replicas."""
    _options(case, None, deterministic=True)


@kind("options", allowed=MAY_BE_RIGHT)
def deadline(case: Case) -> None:
    """One rank has a deadline."""
    _options(case, None, timeout_seconds=5.0)


@kind("options")
def deadline_and_longer(case: Case) -> None:
    """All have a deadline, and one rank's array is longer."""
    count = case.pick(case.count, case.count + max(1, case.count // 5))
    case.all_reduce("sum", case.operand(count), options=CommunicationOptions(timeout_seconds=5.0))


@kind("options", allowed=MAY_BE_RIGHT)
def error_feedback(case: Case) -> None:
    """One rank keeps what the casts lose."""
    usual = CommunicationOptions(wire_dtype="bfloat16", algorithm="hierarchical")
    _options(case, usual, wire_dtype="bfloat16", algorithm="hierarchical", error_feedback=True)


@kind("options", allowed=MAY_BE_RIGHT, sizes=(10, 20_000))
def num_packs(case: Case) -> None:
    """One rank makes its strategy with another number of packs."""
    strategy = mpistrat.MultiWorkerMirroredStrategy(num_packs=case.pick(1, 3))
    case.kept.append(strategy)
    other = Case(case.plan, case.rank, case.size, case.memory, strategy)
    other.odd = case.odd
    other.all_reduce("sum", [other.operand(), other.operand()])
    case.values += other.values
    strategy.close()


@kind("options", allowed=MAY_BE_RIGHT, sizes=(10, 20_000))
def options_of_the_strategy(case: Case) -> None:
    """One rank makes its strategy with other options."""
    options = case.pick(None, CommunicationOptions(bytes_per_pack=4096))
    strategy = mpistrat.MultiWorkerMirroredStrategy(communication_options=options)
    case.kept.append(strategy)
    strategy.close()


@kind("options")
def deterministic_order(case: Case) -> None:
    """All want the order of the replicas, and one rank's array is longer."""
    count = case.pick(case.count, case.count + max(1, case.count // 5))
    case.all_reduce("sum", case.operand(count, "float32"), options=CommunicationOptions(deterministic=True))
