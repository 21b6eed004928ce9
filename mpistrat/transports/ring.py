"""The schedule of a segmented ring: what each rank sends, receives and sums, and in which order. Pure.

Each rank sends ``(n - 1) / n`` of the buffer to its right neighbour twice: once in the reduce-scatter, once in the all-gather.
Every part is sent in segments, so that a segment is summed and sent on while the next one arrives.
Source: P. Patarasu, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel Distrib.
Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["Ring"]


class Ring:
    """The messages of one rank, in the order in which they are sent and received.

    Message i of a step can be sent when message i of the previous step has been received (and summed): message
    ``index + segments`` after message `index`, and the first `segments` messages at once.

    Attributes
    ----------
    segments : int
        Number of segments per part; those of short parts may be empty.
    width : int
        Elements of the longest segment.
    sends, targets : list of slice
        Elements that each message sends, and elements that are received meanwhile.
    reduces : list of bool
        Whether the received elements are summed into the target, or replace it.
    """

    def __init__(self, rank: int, size: int, bounds: Sequence[int], limit: int) -> None:
        self._rank, self._size, self._bounds = rank, size, bounds
        widest = max(stop - start for start, stop in pairwise(bounds))
        self.segments = max(1, -(-widest // max(1, limit)))
        self.width = -(-widest // self.segments)
        self.sends: list[slice] = []
        self.targets: list[slice] = []
        self.reduces: list[bool] = []

    @classmethod
    def all_reduce(cls, rank: int, size: int, count: int, limit: int) -> Ring:
        """Return a reduce-scatter of equal parts, followed by an all-gather."""
        ring = cls(rank, size, [index * count // size for index in range(size + 1)], limit)
        # after the first half this rank has the sum of part rank + 1, which it sends first
        ring._add(rank, reduces=True)
        ring._add(rank + 1, reduces=False)
        return ring

    @classmethod
    def reduce_scatter(cls, rank: int, size: int, bounds: Sequence[int], limit: int) -> Ring:
        """Return the first half, shifted so that rank r ends with part r."""
        ring = cls(rank, size, bounds, limit)
        ring._add(rank - 1, reduces=True)
        return ring

    @classmethod
    def all_gather(cls, rank: int, size: int, bounds: Sequence[int], limit: int) -> Ring:
        """Return the second half."""
        ring = cls(rank, size, bounds, limit)
        ring._add(rank, reduces=False)
        return ring

    def sent_before(self) -> list[int | None]:
        """Return, for each target received in place, the index of the send that must have left that memory before."""
        last_send: dict[int, int] = {}
        before: list[int | None] = []
        for index, (send, target, reduces) in enumerate(zip(self.sends, self.targets, self.reduces, strict=True)):
            before.append(None if reduces or target.start == target.stop else last_send.get(target.start))
            if send.start < send.stop:  # an empty segment begins where the next one does
                last_send[send.start] = index
        return before

    def _add(self, first: int, reduces: bool) -> None:
        """Append one step per part that is sent, from part `first` downwards; the part below is received meanwhile."""
        for step in range(self._size - 1):
            for segment in range(self.segments):
                self.sends.append(self._segment((first - step) % self._size, segment))
                self.targets.append(self._segment((first - step - 1) % self._size, segment))
                self.reduces.append(reduces)

    def _segment(self, part: int, segment: int) -> slice:
        start, stop = self._bounds[part], self._bounds[part + 1]
        return slice(min(start + segment * self.width, stop), min(start + (segment + 1) * self.width, stop))
