"""Plans as text: phases with the bytes that they move, and what was measured of each algorithm."""

from __future__ import annotations

from mpistrat.algorithms.choose import Choice
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.topology.world import World


def phase_bytes(plan: Plan, phase: Phase) -> tuple[int, int]:
    """Return, over the whole buffer, the bytes that the busiest rank sends, and those that leave each node: at least these."""
    sent, link = _shares(plan.world, phase)
    itemsize = plan.wire_itemsize if phase.scope is Scope.INTER and plan.wire_itemsize else plan.itemsize
    return round(sent * plan.count * itemsize), round(link * plan.count * itemsize)


def _shares(world: World, phase: Phase) -> tuple[float, float]:
    """Return the bytes that the busiest rank sends, and those that leave each node, for each byte of the buffer."""
    ranks, between = world.num_shards, _ring(world.num_nodes)
    if phase.scope is Scope.WORLD:
        return _ring(world.size), between
    if phase.scope is Scope.INTER:  # the busiest rank, on the smallest node, owns the most shards
        return between * -(-ranks // min(world.local_sizes)) / ranks, between
    return _ring(ranks) if phase.verb is Verb.ALL_REDUCE else (ranks - 1) / ranks, 0


def _ring(members: int) -> float:
    """Return the bytes that each member of a bandwidth-optimal all-reduce sends, for each byte of the buffer."""
    return 2 * (members - 1) / members


def chunks_text(plan: Plan) -> str:
    """Return the number of elements of a plan's buffer, and how they are cut into chunks."""
    elements = format_count(plan.count, "element")
    if plan.num_chunks < 2:
        return elements
    chunk_bytes = format_bytes(plan.chunk_count * plan.itemsize)
    return f"{elements} in {plan.num_chunks} chunks of {chunk_bytes}, {plan.depth} at a time"


def phases_text(plan: Plan) -> str:
    """Return the phases of a plan, with bytes per rank and per link, as a table."""
    rows = [("phase", "sent per rank", "per node link")]
    for phase in plan.phases:
        sent, link = map(format_bytes, phase_bytes(plan, phase))
        # which algorithm MPI uses is not known, so the minimum is shown
        least = "at least " if phase.scope is Scope.WORLD and plan.world.num_nodes > 1 else ""
        rows.append((str(phase), sent, least + link))
    return format_table(rows, right=(1, 2))


def measured_text(choice: Choice) -> str:
    """Return the time of every algorithm that was measured, as a table."""
    chosen = choice.plan.algorithm
    rows = [(name, format_seconds(time), "chosen" if name == chosen else "") for name, time in choice.seconds.items()]
    return format_table([("algorithm", "as measured", ""), *rows])
