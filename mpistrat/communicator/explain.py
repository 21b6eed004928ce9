"""Explanation: how an all-reduce of some arrays is computed, and its predicted time."""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat.algorithms.choose import Choice
from mpistrat.algorithms.cost import DEFAULT, CostModel, predict_seconds
from mpistrat.algorithms.plan_report import alternatives_text, basis_text, chunks_text, phases_text
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.topology.world import World


@dataclass(frozen=True)
class Pack:
    """Arrays that share a buffer, and how it is reduced.

    Attributes
    ----------
    indices : tuple of int
        Indices of the arrays, in their order in the buffer.
    dtype : str
        The accumulation dtype.
    choice : Choice
        The plan, why it was chosen, and the predicted time of every algorithm.
    transport : str
        What moves the arrays: of arrays in host memory what this replica uses. Empty if nothing is sent.
    """

    indices: tuple[int, ...]
    dtype: str
    choice: Choice
    transport: str = ""


@dataclass(frozen=True)
class Explanation:
    """How an all-reduce of some arrays is computed; ``print()`` shows it in full.

    Attributes
    ----------
    world : World
        The placement of the ranks on nodes.
    packs : tuple of Pack
        In the order in which they are reduced; none if there is one replica.
    model : CostModel or None
        Predicts times; its `source` tells where it comes from. None for arrays on GPUs, for which nobody has measured one.
    """

    world: World
    packs: tuple[Pack, ...] = ()
    model: CostModel | None = DEFAULT

    @property
    def predicted_seconds(self) -> float | None:
        """The predicted time of all packs, one after the other; None without a model."""
        return None if self.model is None else sum(predict_seconds(pack.choice.plan, self.model) for pack in self.packs)

    def __str__(self) -> str:
        if not self.packs:
            return "one replica: nothing is sent" if self.world.size == 1 else "no arrays: nothing is sent"
        num_bytes = sum(pack.choice.plan.num_bytes for pack in self.packs)
        summary = [
            ("world", str(self.world)),
            ("packs", f"{len(self.packs)}, {format_bytes(num_bytes)} in all"),
            *([] if self.predicted_seconds is None else [("predicted", format_seconds(self.predicted_seconds))]),
        ]
        texts = [self._describe(number, pack) for number, pack in enumerate(self.packs)]
        basis = [] if self.model is None else [basis_text(self.model)]
        return "\n\n".join([format_table(summary), *texts, *basis])

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
            *([("transport", pack.transport)] if pack.transport else []),
        ]
        parts = [format_table(heading), phases_text(plan, self.model)]
        return "\n\n".join(parts + ([alternatives_text(pack.choice)] if pack.choice.considered else []))
