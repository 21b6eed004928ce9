"""The stall report: the collective that a rank waits in, for how long, the ranks in it, and what the others do."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.text import format_elapsed, ranks_text
from mpistrat.watch.record import RecordedCall
from mpistrat.watch.states import RankState, entered

_MOST_MISSING = 16


def stall_report(own: RankState, states: Sequence[RankState]) -> str:
    """Return the report of a rank that waits; in all `states` the collective that it waits in was looked up."""
    waiting = own.waits_in
    assert waiting is not None, "only a rank that waits has a report"
    calls = entered(states, waiting.key)
    came = [(state, calls[state.rank]) for state in states if state.rank in calls]
    missing = [state for state in states if waiting.takes(state.rank) and state.rank not in calls]
    failed = [state for state, call in came if call.has_failed]
    # in the collective, but not running
    held = [
        state for state, call in came if call.left_seconds_ago is None and (state.state not in ("in", "out") or state.is_silent)
    ]
    lines = [
        f"rank {own.rank} ({own.node}) has waited {format_elapsed(waiting.entered_seconds_ago)} in collective "
        f"{waiting.number}, {waiting.text}",
        *_in_it(came),
        *_each("missing", missing),
        *_each("failed in it", failed),
        *_each("in it, but not running", held),
    ]
    if not (missing or failed):
        lines.append("  no rank is missing: all ranks are in the collective, but it does not complete")
    lines.append(
        "  The job waits on. `mpistrat doctor` on any of its hosts shows this at any time; MPISTRAT_TIMEOUT_SECONDS ends "
        "such a wait with an error; MPISTRAT_STALL_SECONDS=0 turns this report off."
    )
    return "\n".join(lines)


def end_report(own: RankState, waited_seconds: float, states: Sequence[RankState]) -> str:
    """Return the report of a rank whose program has ended, while others go on."""
    ended = [state.rank for state in states if state.state == "ended"]
    return "\n".join(
        [
            f"the program of rank {own.rank} ({own.node}) has ended {format_elapsed(waited_seconds)} ago; the job goes on",
            f"  ended: {ranks_text(ended)}",
            *_each("not ended", [state for state in states if state.state != "ended"]),
            "  MPISTRAT_STALL_SECONDS=0 turns this report off.",
        ]
    )


def others_report(rank: int, states: Sequence[RankState]) -> str:
    """Return what the other ranks do, a line for each, for a rank that waits outside of collectives."""
    return "\n".join(_each("meanwhile", [state for state in states if state.rank != rank]))


def _each(what: str, states: Sequence[RankState]) -> list[str]:
    """Return a line for each rank, and one for all beyond the first 16."""
    lines = [f"  {what}: {_who(state)}: {state.doing()}" for state in states[:_MOST_MISSING]]
    more = [state.rank for state in states[_MOST_MISSING:]]
    return [*lines, f"  {what}, too: {ranks_text(more)}"] if more else lines


def _in_it(came: Sequence[tuple[RankState, RecordedCall]]) -> list[str]:
    groups: dict[tuple[str, str, bool], list[tuple[RankState, RecordedCall]]] = {}
    for state, call in came:
        if call.has_failed:
            continue
        groups.setdefault((call.text, call.line, call.left_seconds_ago is not None), []).append((state, call))
    lines = []
    for (text, line, has_left), members in groups.items():
        ranks = ranks_text([state.rank for state, _ in members])
        nodes = ", ".join(dict.fromkeys(state.node for state, _ in members))
        since = format_elapsed(max(call.entered_seconds_ago for _, call in members))
        what = "has left it" if has_left else "in it"
        different = f", as {text}" if len({call.text for _, call in came}) > 1 else ""
        lines.append(f"  {what}: {ranks} ({nodes}), since {since}{different}" + (f", from {line}" if line else ""))
    return lines


def _who(state: RankState) -> str:
    place = ", ".join([*([state.node] if state.node else []), *([f"pid {state.pid}"] if state.pid else [])])
    return f"rank {state.rank} ({place})" if place else f"rank {state.rank}"
