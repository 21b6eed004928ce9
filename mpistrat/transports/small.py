"""small: all-reduce of small arrays over all ranks, through the control window of each node and its leader.

Every rank copies its array into its slot, and all ranks of a node meet once. On one node each of them then sums the slots of
all. Where there are several nodes, the leader of each sums those of its node, leaders send each other their sums, and each
publishes the total to its node.

In the meeting, ranks of a node compare their calls; leaders' messages carry the call in their tags. So nothing of another call
is ever read, and every wait can be given up.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.openmpi import num_cores
from mpistrat.reduction import ReduceOp, combine
from mpistrat.transports.base import WAITING, Steps, drive, leave_to_peers
from mpistrat.transports.shared_memory import CALL, ENTERED, RESULT, SMALL_BYTES, SharedMemoryTransport

__all__ = ["MOST_NODES", "SmallAllReduce", "SmallExchange"]

MOST_NODES = 4
"""Beyond, leaders send more messages than an all-reduce of MPI takes."""
MOST_RANKS = 16
"""Of a node: beyond, a tree of MPI's takes fewer steps."""
_POLLS = 40  # before the core is given away; a peer that has a core of its own comes meanwhile
_RESULT_SLOTS = 2  # the first of them


class SmallExchange:
    """What small all-reduces have in common. Making one is a collective call.

    Parameters
    ----------
    hierarchy : Hierarchy
        All ranks.
    window : SharedMemoryTransport or None
        Of the ranks of this node; None where they share no memory.

    Attributes
    ----------
    drive : callable
        Goes through the steps of a wait, under the deadline of the call that is under way.
    """

    def __init__(self, hierarchy: Hierarchy, window: SharedMemoryTransport | None) -> None:
        self.window, self.call, self.leaders = window, hierarchy.call, hierarchy.leaders
        self.rank, self.is_leader = hierarchy.intra.rank, hierarchy.intra.rank == 0
        self.is_one_node = hierarchy.world.num_nodes == 1
        self.turn = self.count = 0
        self.polls = _POLLS if hierarchy.intra.size <= num_cores() else 0
        self.drive: Callable[[Steps], None] = _drive
        self._is_possible = self._agreed(hierarchy)

    def serves(self, nbytes: int) -> bool:
        """Return whether an array of so many bytes goes this way: the same on all ranks."""
        return self._is_possible and 0 < nbytes <= SMALL_BYTES

    def _agreed(self, hierarchy: Hierarchy) -> bool:
        """Return whether all nodes can: each has a window, or a single rank."""
        world = hierarchy.world
        fits = world.num_nodes <= MOST_NODES and len(hierarchy.intra.ranks) <= MOST_RANKS
        mine = fits and (self.window is not None or hierarchy.intra.size == 1) and world.size > 1
        return hierarchy.all_agree(mine)


class SmallAllReduce:
    """The all-reduce of an array of one shape and dtype.

    Parameters
    ----------
    exchange : SmallExchange
        Serves so many bytes.
    op : ReduceOp
        How to combine; MEAN combines as SUM.
    dtype : dtype
        Of the array; the sum is made in it.
    shape : tuple of int
        Likewise.
    """

    def __init__(self, exchange: SmallExchange, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._exchange, self._fold, self._shape, self._dtype = exchange, combine(op), shape, dtype
        window, nbytes = exchange.window, prod(shape) * dtype.itemsize
        # the slots of all ranks of the node, by turns, and those of its leader's results
        self._slots = [
            [slots[turn][:nbytes].view(dtype).reshape(shape) for slots in window.small] if window else [np.empty(shape, dtype)]
            for turn in range(2)
        ]
        self._results = (
            [window.small[0][_RESULT_SLOTS + turn][:nbytes].view(dtype).reshape(shape) for turn in range(2)] if window else []
        )
        leaders = exchange.leaders
        self._total = np.empty(shape, dtype)
        self._sums = (
            [self._total if rank == leaders.rank else np.empty(shape, dtype) for rank in range(leaders.size)] if leaders else []
        )
        self._one_node = exchange.is_one_node

    def run(self, source: Array, target: Array | None = None) -> Array:
        """Return the combination of the sources of all ranks, in `target` if there is one. A collective call.

        Raises
        ------
        CallsDifferError
            On all ranks of a node, if one of them has come with another call.
        """
        if target is None:
            target = np.empty(self._shape, self._dtype)
        self._exchange.drive(self.steps(source, target))
        return target

    def at_once(self) -> Callable[[Array, Array | None], Array]:
        """Return what does the same as `run`; on one node with fewer lines of Python, each of which counts here."""
        exchange, window, fold = self._exchange, self._exchange.window, self._fold
        if window is None or not self._one_node:
            return self.run
        slots, shape, dtype = self._slots, self._shape, self._dtype
        own_slots = [slots[turn][exchange.rank] for turn in range(2)]
        call, own, others, compared, fence = exchange.call, window.own, window.others, window.compared, window.fence_memory
        is_pair, is_fenced = len(others) == 1, window.is_fenced

        def run(source: Array, target: Array | None = None) -> Array:
            exchange.turn = turn = 1 - exchange.turn
            own_slots[turn][...] = source
            window.entered = entered = window.entered + 1
            place = CALL + (entered & 1)
            own[place] = word = call.word
            if is_fenced:
                fence()
            own[ENTERED] = entered
            for words in others:
                if words[ENTERED] < entered:
                    polls = exchange.polls
                    while words[ENTERED] < entered and polls:
                        polls -= 1
                    if words[ENTERED] < entered:
                        exchange.drive(_until(words, ENTERED, entered))
            if is_fenced:
                fence()
            for words in compared:
                if words[place] != word:
                    window.compare(entered)
            if is_pair and shape:
                first, second = slots[turn]
                total: Array = fold(first, second, out=target)
                return total
            if target is None:
                target = np.empty(shape, dtype)
            self._sum(slots[turn], target)
            return target

        return run

    def steps(self, source: Array, target: Array) -> Steps:
        """Return the steps of the same."""
        exchange, window = self._exchange, self._exchange.window
        slots = self._put(source)
        if window is not None:
            entered = window.announce(exchange.call.word)
            for words in window.others:
                yield from _until(words, ENTERED, entered)
            window.compare(entered)
        if self._one_node:
            self._sum(slots, target)
            return
        exchange.count += 1
        if exchange.is_leader:
            # what is raised on a leader alone, where a warning counts as an error, would leave the others waiting
            with np.errstate(all="ignore"):
                self._sum(slots, self._total)
            yield from self._join_leaders(target)
            if window is not None:
                np.copyto(self._results[exchange.turn], target)
                window.fence_memory()
                window.own[RESULT] = exchange.count
            return
        assert window is not None, "a rank that is not a leader shares memory with one"
        yield from _until(window.words[0], RESULT, exchange.count)
        window.fence_memory()
        np.copyto(target, self._results[exchange.turn])

    def _put(self, source: Array) -> list[Array]:
        """Copy the source into this rank's slot; return the slots of all ranks of the node."""
        exchange = self._exchange
        exchange.turn = turn = 1 - exchange.turn
        slots = self._slots[turn]
        slots[exchange.rank if exchange.window is not None else 0][...] = source
        return slots

    def _sum(self, slots: list[Array], target: Array) -> None:
        if len(slots) == 1:
            np.copyto(target, slots[0])
            return
        fold = self._fold
        fold(slots[0], slots[1], out=target)
        for slot in slots[2:]:
            fold(target, slot, out=target)

    def _join_leaders(self, target: Array) -> Steps:
        """Sum what the leaders of all nodes have summed, in the order of the nodes."""
        group = self._exchange.leaders
        assert group is not None, "this rank is a leader"
        comm, tag, peers = group.comm, self._exchange.call.tag(0), [rank for rank in range(group.size) if rank != group.rank]
        requests = [comm.Irecv(_message(self._sums[peer]), peer, tag) for peer in peers]
        requests += [comm.Isend(_message(self._total), peer, tag) for peer in peers]
        try:
            for request in requests:
                while not request.Test():
                    yield WAITING
        except BaseException:
            leave_to_peers((requests, self._sums))
            raise
        with np.errstate(all="ignore"):
            self._sum(self._sums, target)


def _message(array: Array) -> list[Any]:
    from mpi4py import MPI

    return [array, array.nbytes, MPI.BYTE]


def _until(words: memoryview, index: int, least: int) -> Steps:
    while words[index] < least:
        yield WAITING


def _drive(steps: Steps) -> None:
    drive(steps, lambda: "all_reduce")
