"""Survey: collect the states of all ranks, from files on this host, and from one rank of each other host."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from mpistrat.watch.neighbours import Neighbours, absent
from mpistrat.watch.states import Key, RankState, decode
from mpistrat.watch.talk import Message, Talk

__all__ = ["Survey", "here"]

# seconds after which more ranks of a host that does not answer are asked: one first, then two, four, …
_NEXT_SECONDS = 0.3


class Survey:
    """One round of questions.

    Parameters
    ----------
    size : int
        The number of ranks.
    neighbours : Neighbours
        The ranks of this host.
    talk : Talk or None
        Connection to the other hosts; None if there are none, or before MPI runs.
    wanted : collection of Key
        Collectives to look up.
    seconds : float
        How long to wait for answers.
    is_thorough : bool
        Whether to look for processes without a file too, on all hosts; that takes longer.
    heard : sequence of RankState
        States that ranks of other hosts have sent before.
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
        """Return whether all hosts have answered or the time is up; ask more ranks until then."""
        now = time.monotonic()
        self._silent = [ranks for ranks in self._silent if not self._found.keys() & ranks]
        if self._silent and self._talk is not None and now >= self._ask_at:
            first, self._asked = self._asked, 2 * self._asked + 1
            self._ask_at = now + _NEXT_SECONDS
            for ranks in self._silent:
                self._talk.send(self._question, ranks[first : self._asked])
        return not self._silent or now > self._ends

    def take(self, answer: Message) -> None:
        """Add the answer of another host."""
        if answer["answer"] == self.number:
            self._add(decode(answer["states"]))
            self._heard |= {state.rank: state for state in decode(answer["heard"])}

    def states(self) -> list[RankState]:
        """Return the state of each rank, in rank order."""
        return [self._found.get(rank) or self._heard.get(rank) or RankState(rank) for rank in range(self._size)]

    def _add(self, states: Sequence[RankState]) -> None:
        self._found |= {state.rank: state for state in states if state.rank < self._size}


def here(neighbours: Neighbours, wanted: Collection[Key], expected: Collection[int]) -> tuple[list[RankState], set[Key]]:
    """Return the states of the ranks of this host, and the keys looked up; `expected` ranks without a file are searched for."""
    states, keys = neighbours.states(wanted)
    missing = {*expected} - {state.rank for state in states}
    return [*states, *(replace(state) for state in (absent(neighbours.job, missing) if missing else []))], keys
