"""leaders: the sum of a small array over the leaders of all nodes, in rounds of messages that carry the digest of the call.

In each round the ranks of groups of two or three exchange what they have, and combine it in the order of the ranks, so that all
get the same bits. Short arrays are sent whole, in the fewest rounds (recursive doubling). Of longer ones each rank of a group
sends every other one its part, so that all combine a part each, and the parts are gathered in as many rounds again (recursive
halving and doubling). R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, part_bounds
from mpistrat.groups.group import Group, keep_alive_for_peers
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp, combine, quiet_call
from mpistrat.steps import Steps, until
from mpistrat.transports.mpi import byte_message

HALVED_FROM_BYTES = 1 << 14
"""Shorter arrays are sent whole: two more rounds take longer than the bytes that they save."""
RADICES = {2: (2,), 3: (3,), 4: (2, 2)}
"""The sizes of the groups of each round, by the number of nodes: with more it was not measured."""


class _Members(NamedTuple):
    """The ranks that exchange something in a round, of which this one is at `position`."""

    ranks: list[int]
    position: int


@dataclass
class _Round:
    """What this rank sends and receives, by rank, and then combines to `target`, if there are `addends`."""

    sends: dict[int, Array]
    receives: dict[int, Array]
    addends: Sequence[Array] = ()
    target: Array | None = None


class LeaderSum:
    """The sum over the ranks of a group of `own`, an array of a shape and dtype, which goes to `result`.

    Its requests are persistent, since these start faster than new ones, and have the tags of one call.
    """

    def __init__(self, group: Group, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.own, self.result = np.empty(shape, dtype), np.empty(shape, dtype)
        self._digest, self._group = -1, group  # no call has this digest
        self._op = op
        own, result = self.own.reshape(-1), self.result.reshape(-1)
        plan = _halving if self.own.nbytes >= HALVED_FROM_BYTES else _doubling
        self._plan = list(plan(list(_members(group)), group.rank, own, result))
        self._requests: list[MPI.Request] = []
        self._start_all, self._is_finalized = MPI.Prequest.Startall, MPI.Is_finalized

    def run(self, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Sum, in the current call; ``wait(has_arrived)`` waits for a message. A collective call."""
        for has_arrived in self._messages():
            wait(has_arrived)

    def steps(self) -> Steps:
        """Return the steps of `run`. A collective call."""
        for has_arrived in self._messages():
            yield from until(has_arrived)

    def _messages(self) -> Iterator[Callable[[], bool]]:
        """Yield what tells whether the next message has arrived or left, if it has not; the caller waits for it."""
        first, rounds, tests = self._bound()
        try:
            self._start_all(first)
            for arrivals, combine, sends in rounds:
                for has_arrived in arrivals:
                    if not has_arrived():
                        yield has_arrived
                combine()
                if sends:
                    self._start_all(sends)
            for has_left in tests:
                if not has_left():
                    yield has_left
        except BaseException:  # GeneratorExit too: the caller has given up
            keep_alive_for_peers(self)  # a late peer may still write to them
            raise

    def _bound(self) -> tuple[list[Any], list[Any], list[Callable[[], bool]]]:
        """Return what is started first, the rounds, and what tells whether all has been sent, with the tags of this call."""
        if self._digest != self._group.call.digest:
            self._free()
            self._digest = self._group.call.digest
            self._calls = self._bind()
        return self._calls

    def _bind(self) -> tuple[list[Any], list[Any], list[Callable[[], bool]]]:
        comm = self._group.comm
        # a tag for each round: MPI may start what it is told to start together in any order
        plan = [(self._group.call.tag(channel), each) for channel, each in enumerate(self._plan)]
        received = [[comm.Recv_init(byte_message(one), peer, tag) for peer, one in each.receives.items()] for tag, each in plan]
        sent = [[comm.Send_init(byte_message(one), peer, tag) for peer, one in each.sends.items()] for tag, each in plan]
        self._requests = [request for requests in (*received, *sent) for request in requests]
        first = [*(request for requests in received for request in requests), *sent[0]]
        rounds = [
            ([request.Test for request in requests], summing(self._op, each.addends, each.target), following)
            for each, requests, following in zip(self._plan, received, [*sent[1:], []], strict=True)
        ]
        return first, rounds, [request.Test for requests in sent for request in requests]

    def _free(self) -> None:
        while self._requests:
            self._requests.pop().Free()

    def __del__(self) -> None:
        if not self._is_finalized():
            self._free()


def summing(op: ReduceOp, arrays: Sequence[Array], target: Array | None) -> Callable[[], None]:
    """Return what sums arrays to a target, in their order, if there are any; of a single one it makes a copy."""
    if target is None:
        return _nothing
    quiet, fold, (first, *others) = quiet_call(op), combine(op), arrays
    if not others:
        return partial(np.copyto, target, first)
    # two, used alternately: NumPy combines single elements in place three times as slowly
    partials = cycle([np.empty_like(target) for _ in others[:2]])
    steps = list(zip(others, [*islice(partials, len(others) - 1), target], strict=True))

    def add() -> None:
        total = first
        for array, out in steps:
            total = quiet(fold, total, array, out)

    return add


def _members(group: Group) -> Iterator[_Members]:
    """Yield the ranks that exchange something in each round, nearest ones first."""
    stride = 1
    for radix in RADICES[group.size]:
        position = group.rank // stride % radix
        yield _Members([group.rank + (other - position) * stride for other in range(radix)], position)
        stride *= radix


def _doubling(rounds: Sequence[_Members], rank: int, own: Array, result: Array) -> Iterator[_Round]:
    """Yield the rounds in which ranks exchange all that they have."""
    for index, (ranks, _) in enumerate(rounds):
        target = result if index == len(rounds) - 1 else np.empty_like(own)
        receives = {peer: np.empty_like(own) for peer in ranks if peer != rank}
        yield _Round(dict.fromkeys(receives, own), receives, [receives.get(peer, own) for peer in ranks], target)
        own = target


def _halving(rounds: Sequence[_Members], rank: int, own: Array, result: Array) -> Iterator[_Round]:
    """Yield the rounds in which ranks exchange parts, which shrink from round to round, and those that gather the parts."""
    start, gathers = 0, []
    for index, (ranks, position) in enumerate(rounds):
        bounds = part_bounds(own.size, len(ranks))
        parts = {peer: slice(*bounds[place : place + 2]) for place, peer in enumerate(ranks)}
        mine = own[parts[rank]]
        gathers.append({peer: result[start + part.start : start + part.stop] for peer, part in parts.items()})
        start += bounds[position]
        receives = {peer: np.empty_like(mine) for peer in ranks if peer != rank}
        target = result[start : start + mine.size] if index == len(rounds) - 1 else np.empty_like(mine)
        sends = {peer: own[parts[peer]] for peer in receives}
        yield _Round(sends, receives, [receives.get(peer, mine) for peer in ranks], target)
        own = target
    for gather in reversed(gathers):
        mine = gather.pop(rank)
        yield _Round(dict.fromkeys(gather, mine), gather)


def _nothing() -> None:
    """Combine nothing."""
