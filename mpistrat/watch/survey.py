"""Survey: ask all ranks what they do; those of this host by their files, the others by one rank of their node."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from mpistrat.watch.neighbours import Neighbours, absent
from mpistrat.watch.states import Key, RankState, decode
from mpistrat.watch.talk import Message, Talk

__all__ = ["Survey", "here"]

# one rank of a node is asked first, then two, four, …
_NEXT_SECONDS = 0.3


class Survey:
    """One round of questions.

    Parameters
    ----------
    size : int
        How many ranks there are.
    neighbours : Neighbours
        The ranks of this host.
    talk : Talk or None
        How to reach the others; None where there are none, or they cannot be reached yet.
    wanted : collection of Key
        Collectives to look up.
    seconds : float
        How long to wait for answers.
    is_thorough : bool
        Whether to look also for processes that keep no file, here and there; that takes longer.
    heard : sequence of RankState
        What ranks of other hosts have told of themselves before.
    """

    _numbers = iter(range(1, 2**62))

    def __init__(
        self,
        size: int,
        neighbours: Neighbours,
        talk: Talk | None,
        wanted: Collection[Key],
        seconds: float,
        is_thorough: bool = False,
        heard: Sequence[RankState] = (),
    ) -> None:
        self._size, self._talk = size, talk
        self.number = next(self._numbers)
        self._found: dict[int, RankState] = {}
        self._heard = {state.rank: state for state in heard}
        found, self.keys = here(neighbours, wanted, (talk.own if talk else range(size)) if is_thorough else ())
        self._add(found)
        self._silent = list(talk.others) if talk else []
        self._asked = 0
        self._ask_at = time.monotonic()
        self._ends = self._ask_at + seconds
        self._question: Message = {"ask": self.number, "wanted": sorted(self.keys), "is_thorough": is_thorough}

    def is_done(self) -> bool:
        """Return whether all have answered, or the time is up; until then, ask."""
        now = time.monotonic()
        self._silent = [ranks for ranks in self._silent if not self._found.keys() & ranks]
        if self._silent and self._talk is not None and now >= self._ask_at:
            first, self._asked = self._asked, 2 * self._asked + 1
            self._ask_at = now + _NEXT_SECONDS
            for ranks in self._silent:
                self._talk.send(self._question, ranks[first : self._asked])
        return not self._silent or now > self._ends

    def take(self, answer: Message) -> None:
        """Take in what a rank of another node has found there."""
        if answer["tell"] == self.number:
            self._add(decode(answer["states"]))
            self._heard |= {state.rank: state for state in decode(answer["heard"])}

    def states(self) -> list[RankState]:
        """Return the state of each rank, in their order."""
        return [self._found.get(rank) or self._heard.get(rank) or RankState(rank) for rank in range(self._size)]

    def _add(self, states: Sequence[RankState]) -> None:
        self._found |= {state.rank: state for state in states if state.rank < self._size}


def here(neighbours: Neighbours, wanted: Collection[Key], expected: Collection[int]) -> tuple[list[RankState], set[Key]]:
    """Return the states of the ranks of this host, and what was looked up; `expected` ranks without a file are looked for."""
    states, keys = neighbours.states(wanted)
    missing = {*expected} - {state.rank for state in states}
    return [*states, *(replace(state) for state in (absent(neighbours.job, missing) if missing else []))], keys
