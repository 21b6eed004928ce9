"""All-reduce and reduce-scatter between arrays of the caller, inside a node: in a window, or where they lie.

=========  ====================================================  ===================================================
way        what each rank does                                   taken for
=========  ====================================================  ===================================================
_Whole     shows its arrays in the window, sums those of all     two ranks, up to ATTACH_FROM_BYTES; one array in one block
_Window    sums one part, which goes through the window          more ranks up to ATTACH_FROM_BYTES; 16-bit floats; one's part
Attached   sums one part, where the arrays of its peers lie      more bytes, where the kernel permits it
=========  ====================================================  ===================================================

Who sums everything meets his peers once per block, who sums a part twice. Attached copies least, but each rank makes a
system call per block and peer. A reduce-scatter is the first half of the last two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.reduction import Fold
from mpistrat.transports.attached import TABLE_ARRAYS, TABLE_BYTES, Attached
from mpistrat.transports.flat_arrays import FlatArrays, Section
from mpistrat.transports.parts import Parts
from mpistrat.transports.steps import WORKED, Steps
from mpistrat.transports.window import NodeWindow

__all__ = ["WHOLE_SLOT_BYTES", "OneBlock", "exchange", "exchange_bytes"]

EXCHANGE_SLOTS, EXCHANGE_SLOT_BYTES, WHOLE_SLOT_BYTES = 3, 1 << 19, 1 << 21
WINDOW_BYTES = EXCHANGE_SLOTS * EXCHANGE_SLOT_BYTES
LARGEST_ITEM_BYTES = 32
ATTACH_FROM_BYTES = 1 << 20


def exchange_bytes(num_ranks: int) -> int:
    """Return how long the arenas of so many ranks must be; only two of them show each other all."""
    return TABLE_BYTES + WINDOW_BYTES + (EXCHANGE_SLOTS * WHOLE_SLOT_BYTES if num_ranks == 2 else 0)


def exchange(window: NodeWindow, arrays: FlatArrays, fold: Fold, bounds: Sequence[int] | None = None) -> Steps:
    """Return the steps that combine the sources of all ranks into the targets. A collective call.

    Parameters
    ----------
    window : NodeWindow
        Its arenas are at least as long as `exchange_bytes` says.
    arrays : FlatArrays
        The arrays; as many, and as long, on all ranks.
    fold : Fold
        How to combine.
    bounds : sequence of int, optional
        Rank r gets only elements ``bounds[r]:bounds[r + 1]``, in targets that share no memory with the sources: a
        reduce-scatter.
    """
    # where summing takes longer than copying, no element is summed twice
    is_pair = window.group.size == 2 and not fold.widens and bounds is None
    # the kernel looks at each page: that pays where arrays are so large that they lie in huge ones
    attach_from = ATTACH_FROM_BYTES * (len(arrays.sources) if bounds is None else 1)
    # what fits one block may go by the fast path on the other rank, `OneBlock`
    is_one_block = is_pair and len(arrays.sources) == 1 and arrays.nbytes <= WHOLE_SLOT_BYTES
    if not is_one_block and arrays.nbytes >= attach_from and len(arrays.sources) <= TABLE_ARRAYS and not window.peers.refusal:
        return Attached(window, arrays, fold, bounds).run()
    return _Whole(window, arrays, fold).run() if is_pair else _Window(window, arrays, fold, bounds).run()


class _Whole(Parts):
    """Block k lies in the arenas of all ranks, in slot ``k % 3`` counted from when the arenas were made.

    A rank fills a slot once all have filled the one before; then they have summed the one that is three before it.
    """

    def run(self) -> Steps:
        window, count = self.window, self.arrays.count
        step = WHOLE_SLOT_BYTES // self.itemsize
        starts = range(0, count, step)
        if len(starts) > 1:  # one block is not a walk: `OneBlock`, by which a peer may go, takes none
            starts = window.walk(starts)
        blocks = [self.arrays.cuts.pieces(start, min(start + step, count)) for start in starts]
        slots: list[list[Array]] = []
        for block in blocks[:1]:
            slots.append(self._put(block))
            met = window.meet()
        for index, block in enumerate(blocks):
            yield from met
            for following in blocks[index + 1 : index + 2]:
                slots.append(self._put(following))
                met = window.meet()
            for _, target, addends in self.views(block, slots[index]):
                self.fold.into(target, addends)
            yield WORKED

    def _put(self, block: Sequence[Section]) -> list[Array]:
        """Copy a block into this rank's arena; return the slots in the arenas of all."""
        slots = _slots(self.window, self.window.next_turn(), WHOLE_SLOT_BYTES, self.arrays.dtype)
        for source, _, (shown,) in self.views(block, [slots[self.rank]]):
            np.copyto(shown, source)
        return slots


class OneBlock:
    """What `_Whole` does with one array of one block, at once: fewer lines of Python, which count where arrays are small.

    Parameters
    ----------
    window : NodeWindow
        Of two ranks.
    dtype : dtype
        Of the array; no 16-bit float.
    count : int
        Its elements; at most WHOLE_SLOT_BYTES of them in bytes.
    fold : Fold
        How to combine.
    drive : callable
        Goes through the steps of a wait.
    """

    def __init__(
        self,
        window: NodeWindow,
        dtype: np.dtype[Any],
        count: int,
        fold: Fold,
        drive: Callable[[Steps], None],
    ) -> None:
        self._window, self._rank, self._fold, self._drive = window, window.group.rank, fold, drive
        self._turns = [_slots(window, turn, count * dtype.itemsize, dtype) for turn in range(EXCHANGE_SLOTS)]

    def run(self, source: Array, target: Array) -> None:
        """Combine `source` of both ranks into `target`; C-contiguous arrays. A collective call."""
        slots = self._turns[self._window.next_turn() % EXCHANGE_SLOTS]
        # what the peer reads is left to its cache
        addends = [*slots]
        addends[self._rank] = flat = source.reshape(-1)
        np.copyto(slots[self._rank], flat)
        self._drive(self._window.meet())
        self._fold.into(target.reshape(-1), addends)


def _slots(window: NodeWindow, turn: int, nbytes: int, dtype: np.dtype[Any]) -> list[Array]:
    """Return where blocks of a turn lie in the arenas of all ranks."""
    first = TABLE_BYTES + WINDOW_BYTES + turn % EXCHANGE_SLOTS * WHOLE_SLOT_BYTES
    return [arena[first : first + nbytes].view(dtype) for arena in window.arenas]


class _Window(Parts):
    """Through the shared window, in chunks of each part.

    Chunk k of part p lies in slot ``k % 3``, at place p: in the arenas of the other ranks what they add to it, in the arena
    of rank p the result. Three slots, since a result is read one round after a slot's next inputs are written.
    """

    def run(self) -> Steps:
        self.arenas = [arena[TABLE_BYTES : TABLE_BYTES + WINDOW_BYTES].view(self.arrays.dtype) for arena in self.window.arenas]
        self.slot_count = EXCHANGE_SLOT_BYTES // self.itemsize
        # the same places for every dtype: a peer may still read a result while the next exchange begins
        self.step = EXCHANGE_SLOT_BYTES // self.size // LARGEST_ITEM_BYTES * LARGEST_ITEM_BYTES // self.itemsize
        self.num_chunks = -(-max(stop - start for start, stop in pairwise(self.bounds)) // self.step)
        # in one round chunk k goes in, chunk k - 1 is summed and chunk k - 2 goes out, and all ranks meet once
        for turn in range(self.num_chunks + (1 if self.scatters else 2)):
            self._put(turn)
            self._sum(turn - 1)
            met = self.window.meet()
            if not self.scatters:
                self._take(turn - 2)
            yield from met

    def _put(self, chunk: int) -> None:
        """Copy what others sum into this rank's arena."""
        for part in self.others if chunk < self.num_chunks else ():
            start, stop, place = self._span(chunk, part)
            for source, _, (shown,) in self.views(self.arrays.cuts.pieces(start, stop), [self.arenas[self.rank][place:]]):
                np.copyto(shown, source)

    def _sum(self, chunk: int) -> None:
        """Sum this rank's part over all ranks into its targets, and show it to the others if they get it too."""
        if not 0 <= chunk < self.num_chunks:
            return
        start, stop, place = self._span(chunk, self.rank)
        arenas = [self.arenas[peer][place:] for peer in (self.rank, *self.others)]
        for source, target, (shown, *addends) in self.views(self.arrays.cuts.pieces(start, stop), arenas):
            self.fold.into(target, [source, *addends])
            if not self.scatters:
                np.copyto(shown, target)

    def _take(self, chunk: int) -> None:
        """Copy the parts that others have summed to the targets."""
        for part in self.others if chunk >= 0 else ():
            start, stop, place = self._span(chunk, part)
            for _, target, (shown,) in self.views(self.arrays.cuts.pieces(start, stop), [self.arenas[part][place:]]):
                np.copyto(target, shown)

    def _span(self, chunk: int, part: int) -> tuple[int, int, int]:
        """Return where a chunk of a part begins and ends in the arrays, and where it begins in an arena."""
        start = self.bounds[part] + chunk * self.step
        stop = max(start, min(start + self.step, self.bounds[part + 1]))
        return start, stop, chunk % EXCHANGE_SLOTS * self.slot_count + part * self.step
