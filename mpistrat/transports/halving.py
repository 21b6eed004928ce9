"""The schedule of recursive halving and doubling on any number of ranks: who sends what to whom in each round. Pure.

A reduce-scatter takes ceil(log2 n) rounds: in each, the parts that a rank still sums are halved, and it sends one half to
another rank, which sums it. An all-gather takes the same rounds backwards. Each rank sends ``(n - 1) / n`` of the buffer in
either, as in a ring, which takes ``n - 1`` rounds; but a round begins when the one before it has ended, sums included.

Where n is not a power of two, the larger half is kept: in a round ranks send to the rank that is a number of places further,
instead of exchanging in pairs, so no ranks are left over. For a power of two these are Rabenseifner's rounds and bytes.

Sources: J. L. Träff, Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms, arXiv:2410.14234, 2024.
R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, IJHPCA 19(1), 2005.
J. Bruck et al., Efficient Algorithms for All-to-All Communications in Multiport Message-Passing Systems, IEEE TPDS 8(11), 1997
(the all-gather).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Halving", "Round"]


@dataclass(frozen=True)
class Round:
    """What a rank sends and receives at the same time.

    Attributes
    ----------
    to, source : int
        The rank that it sends to, and the one that it receives from.
    sends, targets : tuple of slice
        Elements that each message sends, and elements that are received; none is empty.
    reduces : bool
        Whether the received elements are summed into the targets, or replace them.
    """

    to: int
    source: int
    sends: tuple[slice, ...]
    targets: tuple[slice, ...]
    reduces: bool


class Halving:
    """The rounds of one rank, in order: a round may begin when the one before it has ended.

    Rounds that sum never receive what a rank has already sent, and those that gather receive only that. Each part is summed by
    one rank, so all ranks get the same bits.

    Attributes
    ----------
    rounds : list of Round
        At most ceil(log2 size) for each half of an all-reduce.
    """

    def __init__(self, rank: int, size: int, bounds: Sequence[int], limit: int) -> None:
        self._rank, self._size, self._bounds, self._limit = rank, size, bounds, max(1, limit)
        self.rounds: list[Round] = []

    @classmethod
    def all_reduce(cls, rank: int, size: int, count: int, limit: int) -> Halving:
        """Return a reduce-scatter of equal parts, followed by an all-gather."""
        halving = cls(rank, size, [index * count // size for index in range(size + 1)], limit)
        halving._reduce_scatter()
        halving._all_gather()
        return halving

    @classmethod
    def all_gather(cls, rank: int, size: int, bounds: Sequence[int], limit: int) -> Halving:
        """Return the second half: rank r begins with part r."""
        halving = cls(rank, size, bounds, limit)
        halving._all_gather()
        return halving

    def _reduce_scatter(self) -> None:
        for kept, sent in _halves(self._size):
            self._add(kept, self._parts(kept, sent), -kept, self._parts(0, sent), reduces=True)

    def _all_gather(self) -> None:
        for kept, sent in reversed(_halves(self._size)):
            self._add(-kept, self._parts(0, sent), kept, self._parts(kept, sent), reduces=False)

    def _add(self, to: int, sends: tuple[slice, ...], source: int, targets: tuple[slice, ...], reduces: bool) -> None:
        to, source = (self._rank + to) % self._size, (self._rank + source) % self._size
        self.rounds.append(Round(to, source, sends, targets, reduces))

    def _parts(self, first: int, count: int) -> tuple[slice, ...]:
        """Return the elements of `count` parts, from the one that is `first` places after this rank's on."""
        begin = (self._rank + first) % self._size
        end = min(begin + count, self._size)
        runs = [(begin, end), (0, begin + count - end)]  # the last part is followed by the first one
        return tuple(
            slice(start, min(start + self._limit, self._bounds[stop_part]))
            for first_part, stop_part in runs
            for start in range(self._bounds[first_part], self._bounds[stop_part], self._limit)
        )


def _halves(size: int) -> list[tuple[int, int]]:
    """Return how many parts are kept, and how many are sent, in each round of a reduce-scatter."""
    halves = []
    while size > 1:
        kept = -(-size // 2)
        halves.append((kept, size - kept))
        size = kept
    return halves
