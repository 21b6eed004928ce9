"""All-reduce between arrays of the caller, inside a node: what `SharedMemoryTransport.all_reduce_between` does.

The arrays are cut into parts, one per rank, and each rank sums its part over all. Below ATTACH_FROM_BYTES, and where the
kernel forbids it, parts go through the shared window in chunks. Beyond, each rank reads the arrays of its peers and writes
its sums to theirs where they lie: that copies less, and meets only twice, but costs a system call per block and peer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.arrays import Array
from mpistrat.reduction import ReduceOp, combine, divide
from mpistrat.transports.base import WORKED, Steps, address, leave_to_peers

if TYPE_CHECKING:
    from mpistrat.transports.shared_memory import SharedMemoryTransport

__all__ = ["EXCHANGE_BYTES", "EXCHANGE_SLOTS", "EXCHANGE_SLOT_BYTES", "exchange"]

EXCHANGE_SLOTS, EXCHANGE_SLOT_BYTES = 3, 1 << 19
EXCHANGE_BYTES = EXCHANGE_SLOTS * EXCHANGE_SLOT_BYTES
LARGEST_ITEM_BYTES = 32
ATTACH_FROM_BYTES, BLOCK_BYTES = 1 << 20, 1 << 21
SOURCE, TARGET = 1, 2  # in words of 8 bytes: where a rank's arrays lie


def exchange(transport: SharedMemoryTransport, source: Array, target: Array, op: ReduceOp, divisor: int) -> Steps:
    """Return the steps that combine `source` of all ranks into `target` and divide. A collective call.

    Parameters
    ----------
    transport : SharedMemoryTransport
        Whose arenas are at least EXCHANGE_BYTES long.
    source, target : ndarray
        C-contiguous and one-dimensional; they may be one array.
    op : ReduceOp
        How to combine.
    divisor : int
        Divides the result; 1 for every operation but MEAN.
    """
    through = _Window if transport.peers.refusal or source.nbytes < ATTACH_FROM_BYTES else _Attached
    return through(transport, source, target, op, divisor).run()


class _Parts:
    """The arrays of a rank, cut into one part per rank."""

    def __init__(self, transport: SharedMemoryTransport, source: Array, target: Array, op: ReduceOp, divisor: int) -> None:
        self.transport, self.rank, self.size = transport, transport.group.rank, transport.group.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.source, self.target, self.combine, self.divisor = source, target, combine(op), divisor
        self.bounds = [index * source.size // self.size for index in range(self.size + 1)]


class _Window(_Parts):
    """Through the shared window, in chunks of each part.

    Chunk k of part p lies in slot ``k % 3``, at place p: in the arenas of the other ranks what they add to it, in the arena
    of rank p the result. Three slots, since a result is read one round after a slot's next inputs are written.
    """

    def run(self) -> Steps:
        self.arenas = [arena[:EXCHANGE_BYTES].view(self.source.dtype) for arena in self.transport.arenas]
        self.slot_count = EXCHANGE_SLOT_BYTES // self.source.itemsize
        # the same places for every dtype: a peer may still read a result while the next exchange begins
        self.step = EXCHANGE_SLOT_BYTES // self.size // LARGEST_ITEM_BYTES * LARGEST_ITEM_BYTES // self.source.itemsize
        self.num_chunks = -(-max(stop - start for start, stop in pairwise(self.bounds)) // self.step)
        # in one round chunk k goes in, chunk k - 1 is summed and chunk k - 2 goes out, and all ranks meet once
        for turn in range(self.num_chunks + 2):
            self._put(turn)
            self._fold(turn - 1)
            met = self.transport.meet()
            self._take(turn - 2)
            yield from met

    def _put(self, chunk: int) -> None:
        """Copy what others sum into this rank's arena."""
        for part in self.others if chunk < self.num_chunks else ():
            start, stop, place = self._span(chunk, part)
            np.copyto(self.arenas[self.rank][place : place + stop - start], self.source[start:stop])

    def _fold(self, chunk: int) -> None:
        """Sum this rank's part over all ranks into its target, and show it to the others."""
        if not 0 <= chunk < self.num_chunks:
            return
        start, stop, place = self._span(chunk, self.rank)
        total, addend = self.target[start:stop], self.source[start:stop]
        for peer in self.others:
            self.combine(addend, self.arenas[peer][place : place + stop - start], out=total)
            addend = total
        if self.divisor > 1:
            divide(total, self.divisor, out=total)
        np.copyto(self.arenas[self.rank][place : place + stop - start], total)

    def _take(self, chunk: int) -> None:
        """Copy the parts that others have summed to the target."""
        for part in self.others if chunk >= 0 else ():
            start, stop, place = self._span(chunk, part)
            np.copyto(self.target[start:stop], self.arenas[part][place : place + stop - start])

    def _span(self, chunk: int, part: int) -> tuple[int, int, int]:
        """Return where a chunk of a part begins and ends in the arrays, and where it begins in an arena."""
        start = self.bounds[part] + chunk * self.step
        stop = max(start, min(start + self.step, self.bounds[part + 1]))
        return start, stop, chunk % EXCHANGE_SLOTS * self.slot_count + part * self.step


class _Attached(_Parts):
    """By reading and writing the arrays of peers where they lie.

    Each rank reads its part from all, block by block, and writes the sum to all while it is still in the cache. What one rank
    writes no other one reads, so source and target may be one array.
    """

    def run(self) -> Steps:
        words = self.transport.words[self.rank]
        words[SOURCE], words[TARGET] = address(self.source), address(self.target)
        try:
            yield from self.transport.meet()
            # all have left earlier exchanges, so that this rank's arena is free for what arrives
            self.arrived = self.transport.arenas[self.rank][:EXCHANGE_BYTES].view(self.source.dtype)
            needs_room = self.size > 2 or np.may_share_memory(self.source, self.target)
            step = min(BLOCK_BYTES // self.source.itemsize, self.arrived.size if needs_room else self.source.size)
            blocks = range(self.bounds[self.rank], self.bounds[self.rank + 1], step)
            # every other call walks backwards: what the last one touched last is still in the cache
            self.transport.is_backwards = not self.transport.is_backwards
            for start in reversed(blocks) if self.transport.is_backwards else blocks:
                stop = min(start + step, self.bounds[self.rank + 1])
                self._fold(start, stop)
                yield WORKED
                self._spread(start, stop)
                yield WORKED
            # the caller may change its arrays once nobody reads or writes them
            yield from self.transport.meet()
        except BaseException:
            leave_to_peers((self.source, self.target))
            raise

    def _fold(self, start: int, stop: int) -> None:
        """Sum elements [start, stop) over all ranks into this rank's target."""
        total, addend = self.target[start:stop], self.source[start:stop]
        in_place = np.may_share_memory(total, addend)
        for peer in self.others:
            # what comes first can go straight to the target, unless that is where the addend is
            into = self.arrived[: stop - start] if in_place or addend is total else total
            self.transport.peers.read(peer, self.transport.words[peer][SOURCE] + start * total.itemsize, into)
            self.combine(addend, into, out=total)
            addend = total
        if self.divisor > 1:
            divide(total, self.divisor, out=total)

    def _spread(self, start: int, stop: int) -> None:
        """Write elements [start, stop) of this rank's target to the targets of all others."""
        total = self.target[start:stop]
        for peer in self.others:
            self.transport.peers.write(peer, self.transport.words[peer][TARGET] + start * total.itemsize, total)
