"""Explanation: what an all-reduce of some arrays does, what it should take, and what it last took."""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat.algorithms.choose import Choice
from mpistrat.algorithms.cost import DEFAULT, CostModel, predict_seconds
from mpistrat.algorithms.plan_report import alternatives_text, basis_text, chunks_text, phases_text
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.topology.world import World

__all__ = ["Explanation", "Pack"]


@dataclass(frozen=True)
class Pack:
    """Arrays that share a buffer, and how that is reduced.

    Attributes
    ----------
    indices : tuple of int
        Which of the arrays, in the order in which they lie in the buffer.
    dtype : str
        In which they are combined.
    choice : Choice
        The plan, why it was chosen, and what every algorithm would take.
    model : CostModel
        What its time is predicted by.
    """

    indices: tuple[int, ...]
    dtype: str
    choice: Choice
    model: CostModel = DEFAULT


@dataclass(frozen=True)
class Explanation:
    """What an all-reduce of some arrays does; ``str()`` and ``print()`` show it in full.

    Attributes
    ----------
    world : World
        The placement of the ranks on nodes.
    packs : tuple of Pack
        In the order in which they are reduced; none where there is one replica.
    model : CostModel
        What times are predicted by, and its `source`.
    last_seconds : float or None
        What such a call took last on this replica, without what surrounds its packs. None where there was none, or where it is
        one all-reduce over all ranks at once, which is not timed.
    path : str
        How arrays on GPUs go, where some are; else empty.
    """

    world: World
    packs: tuple[Pack, ...] = ()
    model: CostModel = DEFAULT
    last_seconds: float | None = None
    path: str = ""

    @property
    def predicted_seconds(self) -> float:
        """The predicted time of all packs, one after the other."""
        return sum(predict_seconds(pack.choice.plan, pack.model) for pack in self.packs)

    def __str__(self) -> str:
        if not self.packs:
            return "one replica: nothing is sent" if self.world.size == 1 else "no arrays: nothing is sent"
        last = "not measured" if self.last_seconds is None else format_seconds(self.last_seconds)
        num_bytes = sum(pack.choice.plan.num_bytes for pack in self.packs)
        summary = [
            ("world", str(self.world)),
            ("packs", f"{len(self.packs)}, {format_bytes(num_bytes)} in all"),
            ("predicted", format_seconds(self.predicted_seconds)),
            ("last call", last),
            *([("GPUs", self.path)] if self.path else []),
        ]
        texts = [self._describe(number, pack) for number, pack in enumerate(self.packs)]
        return "\n\n".join([format_table(summary), *texts, basis_text(self.model)])

    def _describe(self, number: int, pack: Pack) -> str:
        plan = pack.choice.plan
        heading = [
            (
                f"pack {number}",
                f"{format_bytes(plan.num_bytes)} of {pack.dtype} from {format_count(len(pack.indices), 'array')}",
            ),
            ("buffer", chunks_text(plan)),
            ("algorithm", plan.algorithm),
            ("why", pack.choice.reason),
        ]
        parts = [format_table(heading), phases_text(plan, pack.model)]
        return "\n\n".join(parts + ([alternatives_text(pack.choice)] if pack.choice.considered else []))
