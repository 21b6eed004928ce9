"""Plans as text: phases with their bytes and predicted times, and the predicted time of every algorithm."""

from __future__ import annotations

from mpistrat.algorithms.choose import Choice
from mpistrat.algorithms.cost import DEFAULT, CostModel, link_bytes, phase_bytes, phase_seconds, predict_seconds
from mpistrat.algorithms.plan import Plan, Scope
from mpistrat.text import format_bytes, format_count, format_seconds, format_table


def chunks_text(plan: Plan) -> str:
    """Return the number of elements of a plan's buffer, and how they are cut into chunks."""
    elements = format_count(plan.count, "element")
    if plan.num_chunks < 2:
        return elements
    chunk_bytes = format_bytes(plan.chunk_count * plan.itemsize)
    return f"{elements} in {plan.num_chunks} chunks of {chunk_bytes}, {plan.depth} at a time"


def phases_text(plan: Plan, model: CostModel | None = DEFAULT) -> str:
    """Return the phases of a plan, with bytes per rank and per link, and times that a model predicts, as a table."""
    rows = [("phase", "sent per rank", "per node link", "predicted" if model else "")]
    for phase in plan.phases:
        sent, link = format_bytes(phase_bytes(plan, phase)), format_bytes(link_bytes(plan, phase))
        # which algorithm MPI uses is not known, so the minimum is shown
        least = "at least " if phase.scope is Scope.WORLD and plan.world.num_nodes > 1 else ""
        rows.append((str(phase), sent, least + link, format_seconds(phase_seconds(plan, phase, model)) if model else ""))
    if model is None:
        return format_table(rows, right=(1, 2))
    overlapped = plan.depth > 1 and len({phase.scope for phase in plan.phases}) > 1
    rows.append(("all, overlapped" if overlapped else "all", "", "", format_seconds(predict_seconds(plan, model))))
    return format_table(rows, right=(1, 2, 3))


def alternatives_text(choice: Choice) -> str:
    """Return the predicted time of every algorithm, as a table."""
    rows = [
        (each.plan.algorithm, format_seconds(each.seconds), "chosen" if each.plan.algorithm == choice.plan.algorithm else "")
        for each in choice.considered
    ]
    return format_table([("alternative", "predicted", ""), *rows])


def basis_text(model: CostModel = DEFAULT) -> str:
    """Return what the predictions are based on."""
    rates = (
        f"{model.link_bytes_per_second / 1e9:.3g} GB/s per node link and {model.memory_bytes_per_second / 1e9:.3g} GB/s of "
        "memory per rank"
    )
    if model.source == DEFAULT.source:
        return f"Predicted for {rates}: default constants; mpistrat tune corrects them by measurements of this cluster."
    return f"Predicted for {rates}, corrected by measurements: {model.source}."
