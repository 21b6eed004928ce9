"""Plans and choices as text: phases with their bytes and predicted times, and what every algorithm would take."""

from __future__ import annotations

from mpistrat.algorithms.choose import Candidate, Choice
from mpistrat.algorithms.cost import DEFAULT, ON_DEVICE, CostModel, link_bytes, phase_bytes, phase_seconds, predict_seconds
from mpistrat.algorithms.plan import Plan, Scope
from mpistrat.text import format_bytes, format_count, format_seconds, format_table

__all__ = ["alternatives_text", "basis_text", "phases_text", "pieces_text"]


def pieces_text(plan: Plan) -> str:
    """Return of how many elements the buffer of a plan is, and how it is cut."""
    elements = format_count(plan.count, "element")
    if plan.num_chunks < 2:
        return elements
    chunk_bytes = format_bytes(plan.chunk_count * plan.itemsize)
    return f"{elements} in {plan.num_chunks} chunks of {chunk_bytes}, {plan.depth} at a time"


def phases_text(plan: Plan, model: CostModel = DEFAULT) -> str:
    """Return the phases of a plan, with bytes per rank and per link, and predicted times, as a table."""
    rows = [("phase", "sent per rank", "per node link", "predicted")]
    for phase in plan.phases:
        sent, link = format_bytes(phase_bytes(plan, phase)), format_bytes(link_bytes(plan, phase))
        # what MPI sends is its own affair: the least possible is known, not the truth
        least = "at least " if phase.scope is Scope.WORLD and plan.world.num_nodes > 1 else ""
        rows.append((str(phase), sent, least + link, format_seconds(phase_seconds(plan, phase, model))))
    overlapped = plan.depth > 1 and len({phase.scope for phase in plan.phases}) > 1
    rows.append(("all, overlapped" if overlapped else "all", "", "", format_seconds(predict_seconds(plan, model))))
    return format_table(rows, right=(1, 2, 3))


def alternatives_text(choice: Choice) -> str:
    """Return what every algorithm would take, or why it declines, as a table."""
    rows = [_alternative(candidate, choice.plan) for candidate in choice.considered]
    return format_table([("alternative", "predicted", ""), *rows])


def basis_text(model: CostModel = DEFAULT) -> str:
    """Return what predictions rest on."""
    rates = (
        f"{model.link_bytes_per_second / 1e9:.3g} GB/s per node link and {model.memory_bytes_per_second / 1e9:.3g} GB/s of "
        "memory per rank"
    )
    if model.source == DEFAULT.source:
        return f"Predicted for {rates}, constants that fit no machine in particular; mpistrat tune measures yours."
    if model.source == ON_DEVICE.source:
        return f"Predicted for {rates}, constants for GPUs that were never measured; mpistrat tune measures memory of the host."
    return f"Predicted for {rates}, as fitted, corrected by what was measured: {model.source}."


def _alternative(candidate: Candidate, chosen: Plan) -> tuple[str, str, str]:
    if candidate.plan is None:
        return candidate.algorithm, "declines", candidate.declined
    return candidate.algorithm, format_seconds(candidate.seconds), "chosen" if candidate.plan == chosen else ""
