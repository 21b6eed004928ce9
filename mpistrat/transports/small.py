"""small: all-reduce of small arrays over all ranks, through the control window of each node and its leader.

Every rank copies its array into its slot. On one node a barrier follows, and each rank sums the slots of all. On several nodes,
the leader of each waits for the ranks of its node and sums their slots, the leaders sum these over all nodes, and each
publishes the total to its node; the other ranks wait only for that.

In each round of the leaders groups of two or three of them exchange what they have, and combine it in the order of the ranks,
so that all get the same bits (recursive doubling; R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective
Communication Operations in MPICH, 2005). To send parts, and gather them in as many rounds again, takes fewer bytes, but with
16 to 32 KiB 1.4 to 1.9 times as long at 10 Gbit/s; on 3 and 4 nodes it takes 0.67 and 0.75 of the time at 1 Gbit/s.

A rank compares the calls of all ranks of its node before it reads their slots, and the leaders' messages carry the digest of
the call in their tags. So no rank reads data of another call, and every wait can be cut off by a deadline.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, cycle, islice
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_bytes
from mpistrat.groups.agreement import COMPARED, ROW, all_agree, digest_of
from mpistrat.groups.group import Group, keep_alive_for_peers
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.openmpi import num_cores, yields_when_idle
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp, combine, quiet_call
from mpistrat.settings import MAX_MESSAGE_BYTES
from mpistrat.steps import Steps, until
from mpistrat.transports.mpi import byte_message
from mpistrat.transports.window import CALL, ENTERED, LEAST_SMALL_BYTES, RESULT, RESULT_SLOTS, NodeWindow

MOST_RANKS = 16
"""Ranks of a node: with more, MPI's tree takes fewer steps."""
_POLLS = 40  # before yielding the core: a peer on its own core usually arrives by then
_YIELDS = 64  # before checking deadlines and verdicts: on a busy machine each may take 20 ms
_LARGE_BYTES = 1 << 14
"""From here on two ranks, each on a core, read their own array where it is: 64 KiB take 11.4 us, and 13.2 from the slot."""
_ROWS_DIGEST = digest_of("rows of all ranks") | COMPARED
_MOST_SENT_BYTES, _MOST_ROWS_BYTES = 512, 1 << 13
"""Of a rank with its row, and of all of them."""
RADICES = {2: (2,), 3: (3,), 4: (2, 2)}
"""The sizes of the groups of leaders in each round, by the number of nodes: with more it was not measured."""


class SmallExchange:
    """The shared state of all small all-reduces. Making one is a collective call."""

    def __init__(self, hierarchy: Hierarchy, window: NodeWindow | None) -> None:
        self.window, self.call, self.leaders = window, hierarchy.call, hierarchy.leaders
        self.rank, self.is_leader = hierarchy.intra.rank, hierarchy.intra.rank == 0
        self.is_one_node = hierarchy.world.num_nodes == 1
        self.turn = self.count = 0
        yields = yields_when_idle(os.environ)
        self.polls = 0 if yields or hierarchy.intra.size > num_cores() else _POLLS
        self._message_polls = _YIELDS if yields else self.polls  # MPI yields the core itself when it has nothing to do
        self.is_available = self._is_supported(hierarchy)
        most_sent = min(LEAST_SMALL_BYTES, hierarchy.settings[MAX_MESSAGE_BYTES])
        self.most_bytes = window.small_bytes if self.is_one_node and window else most_sent

    def wait(self, has_arrived: Callable[[], bool]) -> None:
        """Wait for a leader; only if that takes longer than usual by steps, which check deadlines and verdicts."""
        for _ in range(self._message_polls):
            if has_arrived():
                return
        for _ in range(_YIELDS):
            os.sched_yield()
            if has_arrived():
                return
        self.call.drive(until(has_arrived))

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
        self.call.drive(chain(window.barrier(entered), window.wait(RESULT, value, [words]) if place == RESULT else ()))

    def blocking_barrier(self, window: NodeWindow, slots: Sequence[Array] = ()) -> Callable[[Array | None], int]:
        """Return `NodeWindow.barrier` as a blocking call with little Python, after it has copied a source to a slot, if any.

        It returns which of the two slots holds the source.
        """
        call, own, others, fence = self.call, window.own, window.others, window.fence_memory
        is_fenced, wait = window.is_fenced, self.wait_for

        def barrier(source: Array | None) -> int:
            turn = self.turn
            if source is not None:
                self.turn = turn = 1 - turn
                slots[turn][...] = source
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

    def serves(self, nbytes: int) -> bool:
        """Return whether arrays of `nbytes` use it: the same on all ranks."""
        return self.is_available and 0 < nbytes <= self.most_bytes

    def rows(self, group: Group) -> RankRows | None:
        """Return the rows of all ranks, in the order of the group, where they are on several nodes that it serves."""
        most_bytes = max(0, min(_MOST_SENT_BYTES, _MOST_ROWS_BYTES // group.size - 8 * ROW)) // 8 * 8
        is_served = not self.is_one_node and self.serves(group.size * (8 * ROW + most_bytes))
        return RankRows(self, group, ROW, most_bytes) if is_served else None

    def _is_supported(self, hierarchy: Hierarchy) -> bool:
        """Return whether every node has a window, or a single rank."""
        world = hierarchy.world
        fits = (world.num_nodes == 1 or world.num_nodes in RADICES) and hierarchy.intra.size <= MOST_RANKS
        mine = fits and (self.window is not None or hierarchy.intra.size == 1) and world.size > 1
        return all_agree(hierarchy.world_group.comm, mine)


class SmallAllReduce:
    """An all-reduce over all ranks, of arrays of one shape and dtype; `name` says by what.

    `adds_in_order` says whether addends are combined in the order of the ranks, and `may_overlap` whether the target may share
    some of the source's memory.
    """

    may_overlap = is_compared = True  # the source is copied to a slot first; ranks compare the call

    def __init__(self, exchange: SmallExchange, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._exchange, self._op, self._shape, self._dtype = exchange, op, shape, dtype
        window, nbytes = exchange.window, prod(shape) * dtype.itemsize
        ways = ["slots of shared memory"] * (window is not None) + ["messages between nodes"] * (not exchange.is_one_node)
        self.name, self.adds_in_order = ", ".join(ways), exchange.is_one_node
        # the slots of all ranks of the node, and those of its leader's results, used alternately
        self._slots = [
            [slots[turn][:nbytes].view(dtype).reshape(shape) for slots in window.small] if window else [np.empty(shape, dtype)]
            for turn in range(2)
        ]
        results = window.small[0][RESULT_SLOTS:] if window else []
        self._results = [slot[:nbytes].view(dtype).reshape(shape) for slot in results]
        self._own_slots = [slots[exchange.rank] for slots in self._slots]
        self.begin = partial(self._begin, window) if window and exchange.is_one_node else None
        if exchange.leaders:
            self._leaders = LeaderSum(exchange.leaders, op, dtype, shape)
            # of each turn, what sums the slots of this node
            self._add_ranks = [summing(op, slots, self._leaders.own) for slots in self._slots]

    def blocking(self) -> Callable[[Array, Array | None], Array]:
        """Return ``all_reduce(source, target)``, which blocks, and returns the target: a new array if that is None."""
        if self._exchange.is_one_node:
            return self._on_one_node()
        return self._on_leader() if self._exchange.is_leader else self._on_follower()

    def steps(self, source: Array, target: Array) -> Steps:
        """Return the steps between two C-contiguous arrays, which may be one. A collective call.

        Raises CallsDifferError on all ranks of a node, if their calls differ.
        """
        exchange, window = self._exchange, self._exchange.window
        if self.begin is not None:
            yield from self.begin(source)[1](target)
            return
        exchange.turn = turn = 1 - exchange.turn
        self._own_slots[turn][...] = source
        if window is not None:
            yield from window.barrier()
        exchange.count += 1
        if exchange.is_leader:
            self._add_ranks[turn]()
            yield from self._leaders.steps()
            if window is not None:
                self._publish(window)
            np.copyto(target, self._leaders.result)
            return
        assert window is not None, "a rank that is not a leader shares memory with one"
        yield from window.wait(RESULT, exchange.count, window.words[:1])
        np.copyto(target, self._results[turn])

    def _begin(self, window: NodeWindow, source: Array) -> tuple[Callable[[], bool], Callable[[Array], Steps]]:
        """Begin a call on one node; return what tells if all ranks have, and the steps that then sum to a target."""
        self._exchange.turn = turn = 1 - self._exchange.turn
        self._own_slots[turn][...] = source
        entered = window.announce()

        def has_arrived() -> bool:
            return all([words[ENTERED] >= entered for words in window.others])

        def finish(target: Array) -> Steps:
            yield from window.barrier(entered)
            summing(self._op, self._slots[turn], target)()

        return has_arrived, finish

    def _on_one_node(self) -> Callable[[Array, Array | None], Array]:
        quiet, fold, shape, dtype = quiet_call(self._op), combine(self._op), self._shape, self._dtype
        assert self._exchange.window is not None, "ranks of a node share memory"
        rank, barrier = self._exchange.rank, self._exchange.blocking_barrier(self._exchange.window, self._own_slots)
        partials = [np.empty(shape, dtype) for _ in range(2)]  # see `summing`
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

    def _on_leader(self) -> Callable[[Array, Array | None], Array]:
        exchange, window, leaders, shape, dtype = self._exchange, self._exchange.window, self._leaders, self._shape, self._dtype
        own, result, run_rounds, wait, add_ranks = leaders.own, leaders.result, leaders.run, exchange.wait, self._add_ranks
        barrier, publish = None, None
        if window is not None:
            barrier, publish = exchange.blocking_barrier(window, self._own_slots), partial(self._publish, window)

        def run(source: Array, target: Array | None = None) -> Array:
            if target is None:
                target = np.empty(shape, dtype)
            if barrier is None or publish is None:  # the only rank of its node
                own[...] = source
                run_rounds(wait)
            else:
                turn = barrier(source)
                exchange.count += 1
                add_ranks[turn]()
                run_rounds(wait)
                publish()
            target[...] = result
            return target

        return run

    def _on_follower(self) -> Callable[[Array, Array | None], Array]:
        """Return the call of a rank that is not a leader: it waits only for the result of the leader, which compares calls."""
        exchange, window, results, shape, dtype = self._exchange, self._exchange.window, self._results, self._shape, self._dtype
        assert window is not None, "a rank that is not a leader shares memory with one"
        own_slots, announce = self._own_slots, window.announce
        words, fence, wait = window.words[0], window.fence_memory, exchange.wait_for

        def run(source: Array, target: Array | None = None) -> Array:
            exchange.turn = turn = 1 - exchange.turn
            own_slots[turn][...] = source
            entered = announce()
            exchange.count = count = exchange.count + 1
            if target is None:
                target = np.empty(shape, dtype)
            if words[RESULT] < count:
                wait(window, words, RESULT, count, entered)
            fence()
            target[...] = results[turn]
            return target

        return run

    def _publish(self, window: NodeWindow) -> None:
        """Publish the sum of all nodes to the ranks of this one."""
        self._results[self._exchange.turn][...] = self._leaders.result
        window.fence_memory()
        window.own[RESULT] = self._exchange.count


class RankRows:
    """A row of each rank of a group over several nodes: some numbers, and up to `most_bytes` of memory.

    Ranks exchange them by a small sum, in which each leaves the rows of the others 0. It has the same digest in all calls, so
    that ranks in different ones meet, and find that out.
    """

    def __init__(self, exchange: SmallExchange, group: Group, numbers: int, most_bytes: int) -> None:
        self.most_bytes, self._numbers, self._group = most_bytes, numbers, group
        self._own, self.found = np.zeros((2, group.size, numbers + most_bytes // 8), np.int64)
        self._sum = SmallAllReduce(exchange, ReduceOp.SUM, self._own.dtype, self._own.shape)

    def steps(self, numbers: Sequence[int], memory: Array | None = None) -> Steps:
        """Return the steps after which the numbers of all ranks begin the rows of `found`. A collective call."""
        own, call = self._own[self._group.rank], self._group.call
        own[: self._numbers] = numbers
        if memory is not None:
            as_bytes(own[self._numbers :])[: memory.nbytes] = memory
        digest, call.digest = call.digest, _ROWS_DIGEST
        try:
            yield from self._sum.steps(self._own, self.found)
        finally:
            call.digest = digest

    def shared(self, rank: int) -> Array:
        """Return the memory of a rank, valid until the next exchange."""
        return as_bytes(self.found[rank, self._numbers :])


class _Round(NamedTuple):
    """What this rank sends to some others, what it `receives` of each, and combines: the `addends`, to a target."""

    own: Array
    receives: dict[int, Array]
    addends: Sequence[Array]
    target: Array


class LeaderSum:
    """The sum over the ranks of a group of `own`, an array of a shape and dtype, which goes to `result`.

    Its requests are persistent, since these start faster than new ones, and have the tags of one call.
    """

    def __init__(self, group: Group, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.own, self.result = np.empty(shape, dtype), np.empty(shape, dtype)
        self._digest, self._group = -1, group  # no call has this digest
        self._op = op
        own, result = self.own.reshape(-1), self.result.reshape(-1)
        self._plan = list(_rounds(group, own, result))
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
        sent = [[comm.Send_init(byte_message(each.own), peer, tag) for peer in each.receives] for tag, each in plan]
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


def summing(op: ReduceOp, arrays: Sequence[Array], target: Array) -> Callable[[], None]:
    """Return what sums arrays to a target, in their order; of a single one it makes a copy."""
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


def _rounds(group: Group, own: Array, result: Array) -> Iterator[_Round]:
    """Yield the rounds in which ranks exchange all that they have, nearest ones first."""
    stride, radices = 1, RADICES[group.size]
    for index, radix in enumerate(radices):
        first = group.rank - group.rank // stride % radix * stride
        ranks = range(first, first + radix * stride, stride)
        target = result if index == len(radices) - 1 else np.empty_like(own)
        receives = {peer: np.empty_like(own) for peer in ranks if peer != group.rank}
        yield _Round(own, receives, [receives.get(peer, own) for peer in ranks], target)
        own, stride = target, stride * radix
