"""Deadlock detection: from the states of all ranks, find those that can never leave the collectives that they are in.

A rank that waits in a collective waits for the ranks that have not entered it. If those wait themselves, for ranks that wait,
or have ended, none of them will go on, at any speed of the network. A rank that computes, or is slow, is not deadlocked.

Invariant: pure. States are read one after another, so a finding must be confirmed by a second one before it is acted on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mpistrat.errors import AgreementError, CollectiveError, UnavailableError
from mpistrat.text import ranks_by, ranks_text
from mpistrat.watch.record import Key
from mpistrat.watch.states import RankState, entered

_OVER = ("ended", "failed", "killed", "gone")
_SAME = "Every rank must make the same collective calls"


@dataclass(frozen=True)
class Notice:
    """A deadlock, a mismatch of calls, or a rank that has failed: of several about one collective the first counts."""

    communicator: int
    number: int
    text: str  # of the error
    is_mismatch: bool  # ranks made different calls; otherwise one has ended or failed
    is_for_all: bool = True  # otherwise only ranks in this collective or a later one of its communicator raise it

    def concerns(self, inside: Collection[Key]) -> Key | None:
        """Return the collective, of those that a rank is inside, that cannot end because of this; None if there is none."""
        return next((key for key in inside if key[0] == self.communicator and key[1] >= self.number), None)

    @property
    def name(self) -> str:
        """The name of its file, after the prefix."""
        return f"{self.communicator}-{self.number}"

    def error(self) -> CollectiveError:
        return AgreementError(self.text) if self.is_mismatch else UnavailableError(self.text)


@dataclass(frozen=True)
class Finding:
    """A deadlock, or a mismatch of calls, that one survey shows; the fingerprint, which rank was where, recognises it again."""

    notice: Notice
    fingerprint: tuple[object, ...]


def judge(states: Sequence[RankState], looked_up: Collection[Key]) -> Finding | None:
    """Return the deadlock or mismatch that the states of all ranks show; None if there is none for certain."""
    return _different(states) or _stuck(states, looked_up)


def waits_for(states: Sequence[RankState], looked_up: Collection[Key]) -> dict[int, list[int]]:
    """Return for each waiting rank the ranks that have not entered its collective."""
    waiting = {state.rank: call for state in states if (call := state.waits_in) is not None and call.key in looked_up}
    came = {key: entered(states, key) for key in {call.key for call in waiting.values()}}
    return {
        rank: [
            other.rank
            for other in states
            if other.state != "unknown" and call.takes(other.rank) and other.rank not in came[call.key]
        ]
        for rank, call in waiting.items()
    }


def _different(states: Sequence[RankState]) -> Finding | None:
    """Find a collective that ranks entered with different calls, and that one of them waits in."""
    for key in sorted({call.key for state in states if (call := state.waits_in) is not None}):
        calls = entered(states, key)
        if len({call.digest for call in calls.values()} - {0}) < 2:
            continue
        first = next(iter(calls.values()))
        variants = ranks_by(
            (state.rank, calls[state.rank].place if state.rank in calls else f"has not come to it: {state.doing()}")
            for state in states
            if first.takes(state.rank)
        )
        text = mismatch_text(f"collective {key[1]} of group world", variants)
        return Finding(Notice(*key, text, True), tuple((rank, call.digest, call.entered) for rank, call in calls.items()))
    return None


def _stuck(states: Sequence[RankState], looked_up: Collection[Key]) -> Finding | None:
    """Find ranks that wait for each other, or for ranks that have ended."""
    calls = {state.rank: call for state in states if (call := state.waits_in) is not None}
    running = {state.rank for state in states if state.state == "in"}
    over = {state.rank for state in states if state.state in _OVER}
    # the program may go on beside what it has started, or on other threads; what a rank that is over has not come to never ends
    goes_on = {state.rank for state in states if state.has_threads or (state.waits_in and state.waits_in.is_started)}
    missing = {
        rank: [other for other in others if other in over or rank not in goes_on]
        for rank, others in waits_for(states, looked_up).items()
        if rank in running
    }
    held = {*missing, *over}
    while free := {rank for rank in held - over if not held.intersection(missing[rank])}:
        held -= free
    waiting = sorted(held - over)
    if not waiting:
        return None
    key = calls[waiting[0]].key
    fingerprint = tuple((rank, calls[rank].key, calls[rank].entered) for rank in waiting)
    reached = over.intersection(*[[other for rank in waiting for other in missing[rank]]])
    if reached:
        inside = ranks_by((rank, f"collective {calls[rank].number}, {calls[rank].place}") for rank in waiting)
        text = _ended([state for state in states if state.rank in reached], inside)
        return Finding(Notice(*key, text, False), (*fingerprint, *sorted(reached)))
    variants = ranks_by(
        (state.rank, f"collective {call.number} of communicator {call.communicator}, {call.place}" if call else state.doing())
        for state in states
        for call in [calls.get(state.rank)]
    )
    return Finding(Notice(*key, mismatch_text("they wait for each other", variants), True), fingerprint)


def mismatch_text(what: str, variants: Mapping[str, Sequence[int]]) -> str:
    """Return the text of an AgreementError: which ranks (world ranks, by text of the call) are in which call."""
    lines = [f"ranks made different calls ({what}):", *_by_ranks(variants)]
    if len(variants) == 1:
        lines.append("  The calls are equal; an earlier call differed, or `is_strict` is not the same on all ranks.")
    last = f"{_SAME} in the same order, with the same operation, structure, dtypes and shapes."
    return "\n".join([*lines, last])


def _ended(reached: Sequence[RankState], inside: Mapping[str, Sequence[int]]) -> str:
    who = [f"  rank {state.rank} ({state.node}): {state.doing()}" for state in reached]
    first = f"{ranks_text([state.rank for state in reached])} will not come to a collective that others wait in:"
    last = f"{_SAME}; a rank that has no data left must still take part in those of the others."
    return "\n".join([first, *who, *_by_ranks(inside), last])


def _by_ranks(texts: Mapping[str, Sequence[int]]) -> list[str]:
    return [f"  {ranks_text(ranks)}: {text}" for text, ranks in texts.items()]
