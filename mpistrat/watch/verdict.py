"""Deadlock detection: from the states of all ranks, find those that can never leave the collectives that they are in.

A rank that waits in a collective waits for the ranks that have not entered it. If those wait themselves, for ranks that wait,
or have ended, none of them will go on, at any speed of the network. A rank that computes, or is slow, is not deadlocked.

File law: pure. States are read one after another, so a finding must be confirmed by a second one before it is acted on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mpistrat.text import ranks_text
from mpistrat.watch.notices import Notice
from mpistrat.watch.states import Call, Key, RankState

__all__ = ["Finding", "judge", "mismatch_text", "waits_for"]

_OVER = ("ended", "failed", "gone")


@dataclass(frozen=True)
class Finding:
    """A deadlock, or a mismatch of calls, that one survey shows.

    Attributes
    ----------
    notice : Notice
        Why, for all ranks.
    fingerprint : tuple
        Which rank was where: the same finding, made again, has an equal one.
    """

    notice: Notice
    fingerprint: tuple[object, ...]


def judge(states: Sequence[RankState], looked_up: Collection[Key]) -> Finding | None:
    """Return the deadlock or mismatch that states show; None if there is none for certain.

    Parameters
    ----------
    states : sequence of RankState
        The state of each rank, in rank order.
    looked_up : collection of Key
        The collectives that were looked up for every rank: a rank whose state lacks one of them has not entered it.
    """
    return _different(states) or _stuck(states, looked_up)


def waits_for(states: Sequence[RankState], looked_up: Collection[Key]) -> dict[int, list[int]]:
    """Return for each waiting rank the ranks that have not entered its collective."""
    waiting = {state.rank: state.waits_in for state in states}
    return {
        rank: [
            other.rank for other in states if other.state != "unknown" and call.takes(other.rank) and other.at(call.key) is None
        ]
        for rank, call in waiting.items()
        if call is not None and call.key in looked_up
    }


def _different(states: Sequence[RankState]) -> Finding | None:
    """Find a collective that ranks entered with different calls, and that one of them waits in."""
    for key in sorted({call.key for state in states if (call := state.waits_in) is not None}):
        calls = {state.rank: call for state in states if (call := state.at(key)) is not None}
        if len({call.digest for call in calls.values()} - {0}) < 2:
            continue
        variants: dict[str, list[int]] = {}
        first = next(iter(calls.values()))
        for state in states:
            if not first.takes(state.rank):
                continue
            call = calls.get(state.rank)
            text = (call.text + (f" at {call.line}" if call.line else "")) if call else f"has not come to it: {state.doing()}"
            variants.setdefault(text, []).append(state.rank)
        text = mismatch_text(f"collective {key[1]} of group world", variants)
        return Finding(Notice(*key, text, True), tuple((rank, call.digest, call.entered) for rank, call in calls.items()))
    return None


def _stuck(states: Sequence[RankState], looked_up: Collection[Key]) -> Finding | None:
    """Find ranks that wait for each other, or for ranks that have ended."""
    by_rank = {state.rank: state for state in states}
    missing = {
        rank: others
        for rank, others in waits_for(states, looked_up).items()
        if by_rank[rank].state == "in" and not _call(by_rank[rank]).is_started
    }
    over = {state.rank for state in states if state.state in _OVER}
    held = {*missing, *over}
    while True:
        free = {rank for rank in held - over if not held.intersection(missing[rank])}
        if not free:
            break
        held -= free
    waiting = sorted(held - over)
    if not waiting:
        return None
    key = _call(by_rank[waiting[0]]).key
    fingerprint = tuple((rank, _call(by_rank[rank]).key, _call(by_rank[rank]).entered) for rank in waiting)
    reached = sorted(over.intersection(*[[other for rank in waiting for other in missing[rank]]]))
    if reached:
        return Finding(Notice(*key, _ended(by_rank, waiting, reached), False), (*fingerprint, *reached))
    variants: dict[str, list[int]] = {}
    for state in states:
        call = state.waits_in
        place = f"collective {call.number} of communicator {call.communicator}, {call.text}" if call else state.doing()
        variants.setdefault(place + (f" at {call.line}" if call and call.line else ""), []).append(state.rank)
    return Finding(Notice(*key, mismatch_text("they wait for each other", variants), True), fingerprint)


def mismatch_text(what: str, variants: Mapping[str, Sequence[int]]) -> str:
    """Return the text of an AgreementError: which ranks (world ranks, by text of the call) are in which call."""
    lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in variants.items()]
    if len(variants) == 1:
        lines.append("  They differ in what preceded this call, or in whether they compare it before it begins (`is_strict`).")
    return (
        f"ranks made different calls ({what}):\n"
        + "\n".join(lines)
        + "\nEvery rank must make the same collective calls in the same order, with the same operation, structure, "
        "dtypes and shapes."
    )


def _ended(by_rank: dict[int, RankState], waiting: Sequence[int], reached: Sequence[int]) -> str:
    calls: dict[str, list[int]] = {}
    for rank in waiting:
        call = _call(by_rank[rank])
        calls.setdefault(f"collective {call.number}, {call.text}" + (f" at {call.line}" if call.line else ""), []).append(rank)
    who = [f"  rank {rank} ({by_rank[rank].node}): {by_rank[rank].doing()}" for rank in reached]
    where = [f"  {ranks_text(ranks)}: {text}" for text, ranks in calls.items()]
    return (
        f"{ranks_text(reached)} will not come to a collective that others wait in:\n"
        + "\n".join([*who, *where])
        + "\nEvery rank must make the same collective calls; a rank that has no data left must still take part in those of the "
        "others."
    )


def _call(state: RankState) -> Call:
    call = state.waits_in
    assert call is not None, "it waits"
    return call
