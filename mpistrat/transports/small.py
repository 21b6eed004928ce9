"""small: all-reduce of small arrays over all ranks, through the control window of each node and its leader.

Every rank copies its array into its slot. On one node all ranks meet, and each of them sums the slots of all. Where there are
several nodes, the leader of each waits for the ranks of its node and sums their slots, leaders send each other their sums, and
each publishes the total to its node; the other ranks wait for that alone.

Who reads slots has compared the calls of all ranks of the node before; leaders' messages carry the call in their tags. So
nothing of another call is ever read, and every wait can be given up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.openmpi import num_cores, yields_when_idle
from mpistrat.reduction import ReduceOp, combine
from mpistrat.transports.leader_messages import LeaderMessages
from mpistrat.transports.steps import WAITING, Steps
from mpistrat.transports.window import CALL, ENTERED, LEAST_SMALL_BYTES, RESULT, NodeWindow

__all__ = ["MOST_NODES", "SmallAllReduce", "SmallExchange"]

MOST_NODES = 4
"""Beyond, leaders send more messages than an all-reduce of MPI takes."""
MOST_RANKS = 16
"""Of a node: beyond, a tree of MPI's takes fewer steps."""
_POLLS = 40  # before the core is given away; a peer that has a core of its own comes meanwhile
_YIELDS = 600  # before deadlines and verdicts are looked at
_RESULT_SLOTS = 2  # the first of them


class SmallExchange:
    """What small all-reduces have in common. Making one is a collective call.

    Parameters
    ----------
    hierarchy : Hierarchy
        All ranks.
    window : NodeWindow or None
        Of the ranks of this node; None where they share no memory.
    """

    def __init__(self, hierarchy: Hierarchy, window: NodeWindow | None) -> None:
        self.window, self.call, self.leaders = window, hierarchy.call, hierarchy.leaders
        self.rank, self.is_leader = hierarchy.intra.rank, hierarchy.intra.rank == 0
        self.is_one_node = hierarchy.world.num_nodes == 1
        self.are_all_leaders = hierarchy.world.num_nodes == hierarchy.world.size
        self.turn = self.count = 0
        is_crowded = hierarchy.intra.size > num_cores() or yields_when_idle(os.environ)
        self.polls = 0 if is_crowded else _POLLS
        self._is_possible = self._agreed(hierarchy)
        self.most_bytes = window.small_bytes if self.is_one_node and window else LEAST_SMALL_BYTES

    def wait(self, has_come: Callable[[], bool]) -> None:
        """Wait for a peer, without a look at deadlines and verdicts in the short time that this takes as a rule."""
        for _ in range(self.polls):
            if has_come():
                return
        for _ in range(_YIELDS):
            if has_come():
                return
            os.sched_yield()
        self.call.drive(_until(has_come))

    def meet(self, window: NodeWindow) -> None:
        """Meet the ranks of this node.

        Raises
        ------
        CallsDifferError
            On all of them, if one of them has come with another call.
        """
        entered = window.announce(self.call.word)
        for words in window.others:
            if words[ENTERED] < entered:
                self.wait(partial(_has_reached, words, ENTERED, entered))
        window.compare(entered)

    def wait_for_result(self, window: NodeWindow, entered: int) -> None:
        """Wait until the leader of this node has published the result of the present call.

        Raises
        ------
        CallsDifferError
            If ranks of this node have come with different calls: there will be none.
        """
        words, count = window.words[0], self.count
        for _ in range(self.polls):
            if words[RESULT] >= count:
                return
        for _ in range(_YIELDS):
            if words[RESULT] >= count:
                return
            os.sched_yield()
        self.call.drive(_until_result(window, entered, count))

    def serves(self, nbytes: int) -> bool:
        """Return whether an array of so many bytes goes this way: the same on all ranks."""
        return self._is_possible and 0 < nbytes <= self.most_bytes

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
        # of each node, of which this rank makes its own node's, if it is a leader
        self._sums = [np.empty(shape, dtype) for _ in range(leaders.size)] if leaders else []
        self._messages: LeaderMessages | None = None
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
        self._exchange.call.drive(self.steps(source, target))
        return target

    def at_once(self) -> Callable[[Array, Array | None], Array]:
        """Return what does the same as `run` with fewer lines of Python, each of which counts here."""
        if self._one_node:
            return self._on_one_node()
        return self._between_nodes() if self._exchange.window else self._alone_on_its_node()

    def steps(self, source: Array, target: Array) -> Steps:
        """Return the steps of the same."""
        exchange, window = self._exchange, self._exchange.window
        slots = self._put(source)
        if window is not None:
            entered = window.announce(exchange.call.word)
            for words in window.others:
                yield from _until(partial(_has_reached, words, ENTERED, entered))
            window.compare(entered)
        if self._one_node:
            self._sum(slots, target)
            return
        exchange.count += 1
        if exchange.is_leader:
            messages = self._send(slots)
            try:
                for test in messages.tests:
                    yield from _until(test)
            except BaseException:
                messages.give_up()
                raise
            self._publish(target)
            return
        assert window is not None, "a rank that is not a leader shares memory with one"
        yield from _until(partial(_has_reached, window.words[0], RESULT, exchange.count))
        window.fence_memory()
        np.copyto(target, self._results[exchange.turn])

    def _on_one_node(self) -> Callable[[Array, Array | None], Array]:
        fold, slots, shape, dtype = self._fold, self._slots, self._shape, self._dtype
        assert self._exchange.window is not None, "ranks of a node share memory"
        meet = self._meeting(self._exchange.window)
        is_pair = len(slots[0]) == 2 and bool(shape)

        def run(source: Array, target: Array | None = None) -> Array:
            turn = meet(source)
            if is_pair:
                first, second = slots[turn]
                total: Array = fold(first, second, out=target)
                return total
            if target is None:
                target = np.empty(shape, dtype)
            self._sum(slots[turn], target)
            return target

        return run

    def _alone_on_its_node(self) -> Callable[[Array, Array | None], Array]:
        exchange, fold, shape, dtype = self._exchange, self._fold, self._shape, self._dtype
        call, wait, sums = exchange.call, exchange.wait, self._sums
        assert exchange.leaders is not None, "this rank is a leader"
        own = sums[exchange.leaders.rank]
        is_pair = len(sums) == 2 and bool(shape) and exchange.are_all_leaders

        def run(source: Array, target: Array | None = None) -> Array:
            own[...] = source
            messages = self._messages
            if messages is None or messages.word != call.word:
                messages = self._bind()
            messages.start()
            try:
                for has_come in messages.tests:
                    if not has_come():
                        wait(has_come)
            except BaseException:
                messages.give_up()
                raise
            if is_pair:
                first, second = sums
                total: Array = fold(first, second, out=target)
                return total
            if target is None:
                target = np.empty(shape, dtype)
            self._publish(target)
            return target

        return run

    def _between_nodes(self) -> Callable[[Array, Array | None], Array]:
        window = self._exchange.window
        assert window is not None, "ranks of a node share memory"
        return self._leading(window) if self._exchange.is_leader else self._following(window)

    def _leading(self, window: NodeWindow) -> Callable[[Array, Array | None], Array]:
        exchange, slots, shape, dtype = self._exchange, self._slots, self._shape, self._dtype
        meet, wait = self._meeting(window), exchange.wait

        def run(source: Array, target: Array | None = None) -> Array:
            if target is None:
                target = np.empty(shape, dtype)
            turn = meet(source)
            exchange.count += 1
            messages = self._send(slots[turn])
            try:
                for has_come in messages.tests:
                    if not has_come():
                        wait(has_come)
            except BaseException:
                messages.give_up()
                raise
            self._publish(target)
            return target

        return run

    def _following(self, window: NodeWindow) -> Callable[[Array, Array | None], Array]:
        """Return what leaves a source to the leader and waits once, for its result: it has compared the calls of all."""
        exchange, shape, dtype, results = self._exchange, self._shape, self._dtype, self._results
        own_slots = [slots[exchange.rank] for slots in self._slots]
        call, words, fence, wait = exchange.call, window.words[0], window.fence_memory, exchange.wait_for_result

        def run(source: Array, target: Array | None = None) -> Array:
            exchange.turn = turn = 1 - exchange.turn
            own_slots[turn][...] = source
            entered = window.announce(call.word)
            exchange.count = count = exchange.count + 1
            if target is None:
                target = np.empty(shape, dtype)
            if words[RESULT] < count:
                wait(window, entered)
            fence()
            target[...] = results[turn]
            return target

        return run

    def _meeting(self, window: NodeWindow) -> Callable[[Array], int]:
        """Return what copies a source into this rank's slot and meets the ranks of the node: it returns whose turn it is."""
        exchange = self._exchange
        own_slots = [slots[exchange.rank] for slots in self._slots]
        call, own, others, compared, fence = exchange.call, window.own, window.others, window.compared, window.fence_memory
        is_fenced = window.is_fenced

        def meet(source: Array) -> int:
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
                    exchange.wait(partial(_has_reached, words, ENTERED, entered))
            if is_fenced:
                fence()
            for words in compared:
                if words[place] != word:
                    window.compare(entered)
            return turn

        return meet

    def _put(self, source: Array) -> list[Array]:
        """Copy the source into this rank's slot; return the slots of all ranks of the node."""
        exchange = self._exchange
        exchange.turn = turn = 1 - exchange.turn
        slots = self._slots[turn]
        slots[exchange.rank if exchange.window is not None else 0][...] = source
        return slots

    def _sum(self, slots: list[Array], target: Array) -> None:
        if len(slots) == 1:
            target[...] = slots[0]
            return
        fold = self._fold
        fold(slots[0], slots[1], out=target)
        for slot in slots[2:]:
            fold(target, slot, out=target)

    def _sum_for_others(self, slots: list[Array], target: Array) -> None:
        """Sum what other ranks wait for: where a warning counts as an error, it would be raised on leaders alone."""
        try:
            self._sum(slots, target)
        except Exception:
            with np.errstate(all="ignore"):
                self._sum(slots, target)

    def _send(self, slots: list[Array]) -> LeaderMessages:
        """Sum what the ranks of this node have given, and begin to exchange the sums of all nodes."""
        exchange, group = self._exchange, self._exchange.leaders
        assert group is not None, "this rank is a leader"
        messages = self._messages
        if messages is None or messages.word != exchange.call.word:
            messages = self._bind()
        own = self._sums[group.rank]
        if len(slots) == 1:
            own[...] = slots[0]
        else:
            self._sum_for_others(slots, own)
        messages.start()
        return messages

    def _bind(self) -> LeaderMessages:
        """Return the messages of the present call."""
        exchange = self._exchange
        assert exchange.leaders is not None, "this rank is a leader"
        self._messages = LeaderMessages(exchange.leaders, exchange.call, self._sums)
        return self._messages

    def _publish(self, target: Array) -> None:
        """Sum what the leaders of all nodes have sent, in the order of the nodes, and hand it to the ranks of this node."""
        exchange, window = self._exchange, self._exchange.window
        if exchange.are_all_leaders:
            self._sum(self._sums, target)
            return
        self._sum_for_others(self._sums, target)
        if window is None:
            return
        self._results[exchange.turn][...] = target
        window.fence_memory()
        window.own[RESULT] = exchange.count


def _until(has_come: Callable[[], bool]) -> Steps:
    while not has_come():
        yield WAITING


def _until_result(window: NodeWindow, entered: int, count: int) -> Steps:
    while window.words[0][RESULT] < count:
        if not window.missing():
            window.compare(entered)
        yield WAITING


def _has_reached(words: memoryview, index: int, least: int) -> bool:
    return words[index] >= least
