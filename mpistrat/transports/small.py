"""small: all-reduce of small arrays over all ranks, through the control window of each node and its leader.

Every rank copies its array into its slot. On one node a barrier follows, and each rank sums the slots of all. On several nodes,
the leader of each waits for the ranks of its node and sums their slots, the leaders exchange their sums, and each publishes the
total to its node; the other ranks wait only for that.

A rank compares the calls of all ranks of its node before it reads their slots, and the leaders' messages carry the digest of
the call in their tags. So no rank reads data of another call, and every wait can be cut off by a deadline.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from math import prod
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.groups.group import CurrentCall, Group, keep_alive_for_peers
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.openmpi import num_cores, yields_when_idle
from mpistrat.reduction import ReduceOp, combine, quiet_call
from mpistrat.transports.steps import WAITING, Steps
from mpistrat.transports.window import CALL, ENTERED, LEAST_SMALL_BYTES, RESULT, NodeWindow

MOST_NODES = 4
"""With more nodes, leaders would send more messages than MPI's all-reduce does."""
MOST_RANKS = 16
"""Ranks of a node: with more, MPI's tree takes fewer steps."""
_POLLS = 40  # before yielding the core: a peer on its own core usually arrives by then
_YIELDS = 600  # before checking deadlines and verdicts
_LARGE_BYTES = 1 << 14
"""From here on two ranks, each on a core, read their own array where it is: 64 KiB take 11.4 us, and 13.2 from the slot."""
_RESULT_SLOTS = 2  # index of the first one


class SmallExchange:
    """The shared state of all small all-reduces. Making one is a collective call."""

    def __init__(self, hierarchy: Hierarchy, window: NodeWindow | None) -> None:
        self.window, self.call, self.leaders = window, hierarchy.call, hierarchy.leaders
        self.rank, self.is_leader = hierarchy.intra.rank, hierarchy.intra.rank == 0
        self.is_one_node = hierarchy.world.num_nodes == 1
        self.are_all_leaders = hierarchy.world.num_nodes == hierarchy.world.size
        self.turn = self.count = 0
        is_crowded = hierarchy.intra.size > num_cores() or yields_when_idle(os.environ)
        self.polls = 0 if is_crowded else _POLLS
        self.is_available = self._is_supported(hierarchy)
        self.most_bytes = window.small_bytes if self.is_one_node and window else LEAST_SMALL_BYTES

    def wait(self, has_arrived: Callable[[], bool]) -> None:
        """Wait for a leader; only if that takes longer than usual by steps, which check deadlines and verdicts."""
        for _ in range(self.polls):
            if has_arrived():
                return
        for _ in range(_YIELDS):
            os.sched_yield()
            if has_arrived():
                return
        self.call.drive(_until(has_arrived))

    def wait_for(self, window: NodeWindow, words: memoryview, place: int, value: int, entered: int) -> None:
        """Wait until a control word of a rank of this node is `value`: its call in barrier `entered`, or its result.

        If that takes longer than usual, compare the calls of all: see `NodeWindow.barrier`.
        """
        for _ in range(self.polls):
            if words[place] == value:
                return
        for _ in range(_YIELDS):
            os.sched_yield()
            if words[place] == value:
                return
        self.call.drive(_until_result(window, entered, value) if place == RESULT else window.complete(entered))

    def barrier(self, window: NodeWindow) -> None:
        """Wait until all ranks of this node have entered the barrier.

        Raises CallsDifferError on all of them, if their calls differ.
        """
        entered = window.announce(self.call.digest)
        place, stamp = CALL + (entered & 1), self.call.digest + entered
        for words in window.others:
            if words[place] != stamp:
                self.wait_for(window, words, place, stamp, entered)
        window.fence_memory()

    def serves(self, nbytes: int) -> bool:
        """Return whether arrays of `nbytes` use it: the same on all ranks."""
        return self.is_available and 0 < nbytes <= self.most_bytes

    def _is_supported(self, hierarchy: Hierarchy) -> bool:
        """Return whether every node has a window, or a single rank."""
        world = hierarchy.world
        fits = world.num_nodes <= MOST_NODES and len(hierarchy.intra.ranks) <= MOST_RANKS
        mine = fits and (self.window is not None or hierarchy.intra.size == 1) and world.size > 1
        return hierarchy.all_agree(mine)


class LeaderMessages:
    """Arrays exchanged between the leaders of all nodes, by persistent requests, which start faster than new ones."""

    def __init__(self, group: Group, call: CurrentCall, arrays: Sequence[Array]) -> None:
        from mpi4py import MPI

        tag = call.tag(0)
        peers = [rank for rank in range(group.size) if rank != group.rank]
        self.digest, self._arrays = call.digest, arrays
        self._requests = [group.comm.Recv_init(_message(arrays[peer]), peer, tag) for peer in peers]
        self._requests += [group.comm.Send_init(_message(arrays[group.rank]), peer, tag) for peer in peers]
        self.start, self._is_finalized = partial(MPI.Prequest.Startall, self._requests), MPI.Is_finalized
        self.tests = [request.Test for request in self._requests]

    def give_up(self) -> None:
        """Keep the requests and arrays alive forever: a late peer may still write to them."""
        keep_alive_for_peers(self)

    def __del__(self) -> None:
        if not self._is_finalized():
            for request in self._requests:
                request.Free()


class SmallAllReduce:
    """The all-reduce of an array of one shape and dtype."""

    def __init__(self, exchange: SmallExchange, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._exchange, self._fold, self._shape, self._dtype = exchange, combine(op), shape, dtype
        window, nbytes = exchange.window, prod(shape) * dtype.itemsize
        # the slots of all ranks of the node, and those of its leader's results, used alternately
        self._slots = [
            [slots[turn][:nbytes].view(dtype).reshape(shape) for slots in window.small] if window else [np.empty(shape, dtype)]
            for turn in range(2)
        ]
        self._results = (
            [window.small[0][_RESULT_SLOTS + turn][:nbytes].view(dtype).reshape(shape) for turn in range(2)] if window else []
        )
        # two, used alternately: NumPy combines single elements in place three times as slowly
        self._partials = [np.empty(shape, dtype) for _ in range(2)]
        self._messages: LeaderMessages | None = None
        self._one_node, self._quiet = exchange.is_one_node, quiet_call(op)
        if exchange.leaders:
            self._prepare_leader(exchange.leaders)

    def blocking(self) -> Callable[[Array, Array | None], Array]:
        """Return a blocking call, ``all_reduce(source, target)``, with little Python: see `Transport.blocking_all_reduce`."""
        if self._one_node:
            return self._on_one_node()
        return self._between_nodes() if self._exchange.window else self._on_single_rank_node()

    def steps(self, source: Array, target: Array) -> Steps:
        """Return the steps of an all-reduce. A collective call.

        Raises CallsDifferError on all ranks of a node, if their calls differ.
        """
        exchange, window = self._exchange, self._exchange.window
        slots = self._fill_slot(source)
        if window is not None:
            entered = window.announce(exchange.call.digest)
            for words in window.others:
                yield from _until(partial(_has_reached, words, ENTERED, entered))
            window.compare(entered)
        if self._one_node:
            self._sum(slots, target)
            return
        exchange.count += 1
        if exchange.is_leader:
            self._add_ranks[exchange.turn]()
            messages = self._messages_of_call()
            messages.start()
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
        quiet, fold, shape, dtype = self._quiet, self._fold, self._shape, self._dtype
        assert self._exchange.window is not None, "ranks of a node share memory"
        rank, barrier = self._exchange.rank, self._node_barrier(self._exchange.window)
        partials = self._partials
        slots = [(first, [*zip(others, cycle(partials))], last) for first, *others, last in self._slots]

        def run(source: Array, target: Array | None = None) -> Array:
            total, others, last = slots[barrier(source)]
            for slot, partial_sum in others:
                total = quiet(fold, total, slot, partial_sum)
            if target is None and not shape:  # NumPy would return a scalar
                target = np.empty(shape, dtype)
            result: Array = quiet(fold, total, last, target)
            return result

        def run_large_pair(source: Array, target: Array | None = None) -> Array:
            first, second = self._slots[barrier(source)]
            if target is None:
                target = np.empty(shape, dtype)
            # not this rank's slot, whose cache lines the peer reads now
            pair = (first, source) if rank else (source, second)
            quiet(fold, *pair, target)
            return target

        is_large_pair = len(self._slots[0]) == 2 and self._slots[0][0].nbytes >= _LARGE_BYTES
        return run_large_pair if is_large_pair else run

    def _on_single_rank_node(self) -> Callable[[Array, Array | None], Array]:
        exchange, quiet, fold, shape, dtype = self._exchange, self._quiet, self._fold, self._shape, self._dtype
        exchange_sums, sums = self._exchanging(), self._sums
        assert exchange.leaders is not None, "this rank is a leader"
        own = sums[exchange.leaders.rank]
        is_pair = len(sums) == 2 and bool(shape) and exchange.are_all_leaders

        def run(source: Array, target: Array | None = None) -> Array:
            own[...] = source
            exchange_sums()
            if is_pair:
                first, second = sums
                total: Array = quiet(fold, first, second, target)
                return total
            if target is None:
                target = np.empty(shape, dtype)
            self._publish(target)
            return target

        return run

    def _between_nodes(self) -> Callable[[Array, Array | None], Array]:
        window = self._exchange.window
        assert window is not None, "ranks of a node share memory"
        return self._on_leader(window) if self._exchange.is_leader else self._on_follower(window)

    def _on_leader(self, window: NodeWindow) -> Callable[[Array, Array | None], Array]:
        exchange, shape, dtype, results = self._exchange, self._shape, self._dtype, self._results
        add_ranks, add_nodes, exchange_sums = self._add_ranks, self._add_nodes, self._exchanging()
        barrier, own, fence = self._node_barrier(window), window.own, window.fence_memory

        def run(source: Array, target: Array | None = None) -> Array:
            if target is None:
                target = np.empty(shape, dtype)
            turn = barrier(source)
            exchange.count = count = exchange.count + 1
            add_ranks[turn]()
            exchange_sums()
            add_nodes[turn]()
            fence()
            own[RESULT] = count
            target[...] = results[turn]
            return target

        return run

    def _on_follower(self, window: NodeWindow) -> Callable[[Array, Array | None], Array]:
        """Return the call of a rank that is not a leader: it waits only for the result of the leader, which compares calls."""
        exchange, shape, dtype, results = self._exchange, self._shape, self._dtype, self._results
        own_slots = [slots[exchange.rank] for slots in self._slots]
        call, words, fence, wait = exchange.call, window.words[0], window.fence_memory, exchange.wait_for
        announce = window.announce

        def run(source: Array, target: Array | None = None) -> Array:
            exchange.turn = turn = 1 - exchange.turn
            own_slots[turn][...] = source
            entered = announce(call.digest)
            exchange.count = count = exchange.count + 1
            if target is None:
                target = np.empty(shape, dtype)
            if words[RESULT] < count:
                wait(window, words, RESULT, count, entered)
            fence()
            target[...] = results[turn]
            return target

        return run

    def _node_barrier(self, window: NodeWindow) -> Callable[[Array], int]:
        """Return what copies a source to this rank's slot and passes a barrier of the node: it returns the turn (0 or 1)."""
        exchange = self._exchange
        own_slots = [slots[exchange.rank] for slots in self._slots]
        call, own, others, fence = exchange.call, window.own, window.others, window.fence_memory
        is_fenced, wait = window.is_fenced, exchange.wait_for

        def barrier(source: Array) -> int:
            exchange.turn = turn = 1 - exchange.turn
            own_slots[turn][...] = source
            window.entered = entered = window.entered + 1
            place = CALL + (entered & 1)
            if is_fenced:
                fence()
            own[place] = stamp = call.digest + entered
            if is_fenced:
                fence()
            own[ENTERED] = entered
            for words in others:
                # a rank that has entered this barrier in the same call has written the same stamp
                if words[place] != stamp:
                    wait(window, words, place, stamp, entered)
            if is_fenced:
                fence()
            return turn

        return barrier

    def _fill_slot(self, source: Array) -> list[Array]:
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
        total, *others, last = slots
        for slot, partial_sum in zip(others, cycle(self._partials)):
            total = self._quiet(self._fold, total, slot, partial_sum)
        self._quiet(self._fold, total, last, target)

    def _prepare_leader(self, leaders: Group) -> None:
        """Make what a leader sums: of each turn the slots of its node, and then the sums of all nodes, in their order."""
        self._sums = [np.empty(self._shape, self._dtype) for _ in range(leaders.size)]
        self._add_ranks = [self._sum_for_others(slots, self._sums[leaders.rank]) for slots in self._slots]
        self._add_nodes = [self._sum_for_others(self._sums, result) for result in self._results]

    def _sum_for_others(self, arrays: Sequence[Array], target: Array) -> Callable[[], None]:
        """Return what sums arrays."""
        quiet, fold, (first, *others) = self._quiet, self._fold, arrays
        if not others:
            return partial(np.copyto, target, first)
        steps = list(zip(others, [*islice(cycle(self._partials), len(others) - 1), target], strict=True))

        def add() -> None:
            total = first
            for array, out in steps:
                total = quiet(fold, total, array, out)

        return add

    def _messages_of_call(self) -> LeaderMessages:
        """Return the exchange of the sums of all nodes, with the tag of the current call."""
        exchange, messages = self._exchange, self._messages
        if messages is None or messages.digest != exchange.call.digest:
            assert exchange.leaders is not None, "this rank is a leader"
            self._messages = messages = LeaderMessages(exchange.leaders, exchange.call, self._sums)
        return messages

    def _exchanging(self) -> Callable[[], None]:
        """Return what exchanges the sums of all nodes between their leaders."""
        call, wait = self._exchange.call, self._exchange.wait

        def exchange_sums() -> None:
            messages = self._messages
            if messages is None or messages.digest != call.digest:
                messages = self._messages_of_call()
            messages.start()
            try:
                for has_arrived in messages.tests:
                    if not has_arrived():
                        wait(has_arrived)
            except BaseException:
                messages.give_up()
                raise

        return exchange_sums

    def _publish(self, target: Array) -> None:
        """Sum the sums of all nodes, in the order of the nodes, and publish the total to the ranks of this node."""
        exchange, window = self._exchange, self._exchange.window
        if window is None:
            self._sum(self._sums, target)
            return
        self._add_nodes[exchange.turn]()
        window.fence_memory()
        window.own[RESULT] = exchange.count
        np.copyto(target, self._results[exchange.turn])


def _message(array: Array) -> list[Any]:
    from mpi4py import MPI

    return [array, array.nbytes, MPI.BYTE]


def _until(has_arrived: Callable[[], bool]) -> Steps:
    while not has_arrived():
        yield WAITING


def _until_result(window: NodeWindow, entered: int, count: int) -> Steps:
    while window.words[0][RESULT] < count:
        if not window.missing():
            window.compare(entered)
        yield WAITING


def _has_reached(words: memoryview, index: int, least: int) -> bool:
    return words[index] >= least
