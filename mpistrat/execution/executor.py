"""Executor: binds phases of plans to transports, and owns the scratch memory they work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import numpy as np

from mpistrat import settings
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.arrays import MALLOC_REUSES_BYTES, Array
from mpistrat.device.cuda import Device
from mpistrat.errors import TransportError
from mpistrat.execution.select import Transports, host_transports, warn_of_next
from mpistrat.groups.agreement import all_agree, wait_for
from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.packing import CopyIn, CopyOut, Layout
from mpistrat.reduction import HALF_DTYPES, Fold, ReduceOp, divide
from mpistrat.steps import Steps
from mpistrat.timeline import Timeline
from mpistrat.transports.base import FlatArrays, Operation, Part, Transport
from mpistrat.transports.mpi import MpiTransport
from mpistrat.transports.pairwise import ordered_all_reduce
from mpistrat.transports.shared_memory import Exchange, exchange_bytes
from mpistrat.transports.window import MOST_SMALL_BYTES

SMALL_RAIL_BYTES = 1 << 16  # smaller parts go over `Transports.small_rails`
_EXCHANGE_PARTITION = (1, 0)  # no bucket has this one
_IN_ORDER = "messages from all to all, added in the order of the ranks,"


Dtypes = Sequence[np.dtype[Any]]
CopySteps = Callable[[Sequence[Array]], Steps]
"""Returns the steps of a copy between arrays and a bucket."""
Direct = Callable[[FlatArrays, Fold], Steps]
"""Returns the steps of an all-reduce of the caller's arrays, without a bucket."""


@dataclass(frozen=True)
class BucketSpec:
    """Arrays of a call that are combined together: their `indices`, layout and dtypes; and in which dtype, and how."""

    op: ReduceOp
    dtype: np.dtype[Any]
    indices: tuple[int, ...]
    layout: Layout
    dtypes: Dtypes
    wire: np.dtype[Any] | None = None  # that of what is sent between nodes, if it is another one


class Slots:
    """How the scratch memory is divided into slots, and which releases of the peers must precede the next write to each."""

    def __init__(self) -> None:
        self.partition = 0, 0  # the number of slots, and the bytes of each
        # how often this partition has been used in a row: not counted in a plan, so that a rank that binds one again stays in
        # step with the others
        self.turn = -1
        # for each slot the number (`Transport.release`) of its last release, and the last of them all
        self.releases: dict[int, int] = {}
        self.last_release = 0

    def repartition(self, count: int, nbytes: int) -> None:
        """Change the partition: the new slots may overlap any of the old ones."""
        self.partition, self.turn = (count, nbytes), -1
        self.releases = dict.fromkeys(range(count), self.last_release)


class Executor:
    """Binds phases of plans to the transports of one hierarchy. Making one is a collective call."""

    device: Device | None = None
    """The GPU whose memory it works on; None: memory of the host."""

    def __init__(self, hierarchy: Hierarchy, transports: Transports | None = None) -> None:
        keep_freed_memory()
        self.hierarchy = hierarchy
        self.timeline = Timeline()
        self.transports = host_transports(hierarchy) if transports is None else transports
        self.intra, self.world, self.rails = self.transports.intra, self.transports.world, self.transports.rails
        self._window = self.intra.window if hierarchy.intra.size > 1 else None
        self._arena: Array = np.empty(0, np.uint8)
        self.slots = Slots()
        self.generation = 0  # how often the scratch memory was enlarged, and these were unbound
        self.bound_plans: WeakSet[Any] = WeakSet()  # to the scratch memory; `unbind` makes one drop all references to it
        self._agree()
        self.largest_pack_bytes = 0

    def _agree(self) -> None:
        """Find out what holds for the transports of all ranks. A collective call."""
        is_alone, small_rails = self.hierarchy.intra.size == 1, self.transports.small_rails
        mine = (
            is_alone or self.intra.combines_arrays,
            is_alone or self.intra.compares_calls,
            all(rail.compares_calls for rail in small_rails.values()),
            all(rail.compares_calls for rail in self.rails.values()),
        )
        all_ranks = zip(*self.hierarchy.world_group.comm.allgather(mine), strict=True)
        self._reads_peers, self._compares_inside, self._small_rails_compare, self._rails_compare = map(all, all_ranks)

    def max_in_flight(self, depth: int) -> int:
        """Return how many of `depth` chunks may be in flight between nodes."""
        return depth

    def divisor(self, op: ReduceOp) -> int:
        """Return by what a result is divided: for MEAN, whose sum it is, by the number of ranks."""
        return self.hierarchy.world.size if op is ReduceOp.MEAN else 1

    def copy_in(self, layout: Layout, buffer: Array, dtypes: Dtypes) -> CopySteps:
        """Return what copies arrays of these dtypes into a range of a bucket."""
        return CopyIn(layout, buffer).run

    def copy_out(self, layout: Layout, parts: Sequence[Part], buffer: Array, op: ReduceOp, dtypes: Dtypes) -> CopySteps:
        """Return what copies a range of a bucket out to arrays: from the result of its last operation, or from the buffer."""
        addends = [(part.start, part.stop, part.addends) for part in parts] or [(0, buffer.size, (buffer,))]
        return CopyOut(layout, addends, op, self.divisor(op)).run

    def shares_memory(self, array: Array, buffer: Array) -> bool:
        """Return whether an array lies in a buffer."""
        return bool(np.may_share_memory(array, buffer))

    def slot(self, index: int, slot_bytes: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return `count` elements of the scratch memory, from the beginning of a slot."""
        return self._arena[index * slot_bytes : index * slot_bytes + count * dtype.itemsize].view(dtype)

    def operations(
        self, plan: Plan, phase: Phase, slot: int, buffer: Array, op: ReduceOp, wire: np.dtype[Any] | None = None
    ) -> list[tuple[str, Operation]]:
        """Bind one phase on one chunk; what is sent between nodes is cast to the `wire` dtype."""
        world, rank = self.hierarchy.world, self.hierarchy.rank
        shard_count = buffer.size // world.num_shards
        if phase.scope is Scope.INTRA and phase.verb is Verb.ALL_REDUCE and plan.in_order:
            return [(str(phase), self.intra.all_reduce_in_order(buffer, op))]
        if phase.scope is Scope.INTRA:
            ranks = self.hierarchy.place.node.ranks
            bounds = [world.shards_of(member).start * shard_count for member in ranks] + [buffer.size]
            return [(str(phase), _bind(self._inside(phase.verb, buffer.dtype, op), phase.verb, buffer, bounds, op))]
        shards = {shard: buffer[shard * shard_count : (shard + 1) * shard_count] for shard in world.shards_of(rank)}
        if plan.in_order or wire is not None:
            exchanged = [(str(phase), self.hierarchy.world_group, buffer)]
            if phase.scope is Scope.INTER:
                exchanged = [(f"{phase} rail {shard}", self.hierarchy.rails[shard], part) for shard, part in shards.items()]
            return [(name, self._in_order(group, part, op, slot, wire)) for name, group, part in exchanged]
        if phase.scope is Scope.INTER:
            rails = {shard: self._rail(shard, part, op) for shard, part in shards.items()}
            return [(f"{phase} rail {shard}", rails[shard].all_reduce(part, op, slot)) for shard, part in shards.items()]
        return [(str(phase), self._over_all(buffer.dtype, op).all_reduce(buffer, op))]

    def barrier(self) -> Steps:
        """Wait until all ranks of this node have entered, and compare their calls."""
        return iter(()) if self._window is None else self._window.barrier()

    def begins_with_barrier(self, plan: Plan) -> bool:
        """Return whether a plan begins with a `barrier` by itself."""
        if not (plan.phases and plan.count):
            return False
        if plan.phases[0].scope is Scope.INTRA:
            return self.intra.window is not None
        return plan.scopes == {Scope.WORLD} and not plan.in_order and self.device is None

    def detects_mismatch(self, plan: Plan) -> bool:
        """Return whether a rank in another call is found before results are used: the same on all ranks.

        `Transport.compares_calls` says it; the transport over all ranks compares calls itself.
        """
        if Scope.INTRA in plan.scopes and not self._compares_inside:
            return False
        shard_bytes = plan.padded(min(plan.chunk_count, plan.count)) // plan.world.num_shards * plan.itemsize
        is_small = shard_bytes < SMALL_RAIL_BYTES and not plan.bounds
        is_ordered = plan.in_order or plan.wire_itemsize > 0  # by messages whose tags are compared
        rails_compare = is_ordered or (self._small_rails_compare if is_small else self._rails_compare)
        return Scope.INTER not in plan.scopes or rails_compare

    def adds_in_order(self, dtype: np.dtype[Any], op: ReduceOp) -> bool:
        """Return whether the transport inside the node adds such values in the order of the ranks, as NumPy does."""
        return self.intra.adds_in_order

    def nccl_refusal(self, dtype: np.dtype[Any], op: ReduceOp) -> str:
        """Return why NCCL cannot combine such values here, or an empty text."""
        return "these are host arrays"

    @property
    def window_bytes(self) -> int:
        """Bytes of the scratch memory of this rank."""
        return self._arena.nbytes

    @property
    def rail_bytes(self) -> int:
        """Bytes that the transports between nodes hold besides."""
        return sum(rail.scratch_bytes for rail in self.rails.values())

    def adapt(self, plan: Plan, pack: BucketSpec) -> Plan:
        """Return a plan as it runs here, in a bucket or on the arrays where they lie.

        Whatever the algorithm, a sum in the only node goes through the slots of its window if these hold it; several arrays,
        which are copied to a bucket, only where that is never slower.
        """
        given, dtype = pack.dtypes, pack.dtype
        if plan.in_order or len(set(given)) > 1:
            return plan
        small, nbytes, is_one_array = self.world.small, plan.num_bytes, pack.layout.is_one_array and given[0] == dtype
        if plan.scopes == {Scope.INTRA} and small.is_one_node and small.serves(nbytes):
            plan = plan.in_one_phase(Scope.WORLD) if is_one_array or nbytes <= MOST_SMALL_BYTES else plan
        if plan.scopes <= {Scope.WORLD}:
            return plan.in_one_phase(Scope.WORLD, is_direct=True) if is_one_array else plan
        reads_peers = plan.scopes == {Scope.INTRA} and plan.count and self.intra.combines_arrays
        return plan.in_one_phase(Scope.INTRA, is_direct=True) if reads_peers and given[0] in (dtype, *HALF_DTYPES) else plan

    def bind_direct(self, plan: Plan, pack: BucketSpec) -> Direct:
        """Return an all-reduce that works on the caller's arrays, for a direct plan. A collective call."""
        if plan.scopes == {Scope.INTRA}:
            self.reserve_exchange(len(pack.dtypes))
            return self.exchange
        bound = self.world.bind(pack.op, pack.dtype, (plan.count,))

        def over_all(arrays: FlatArrays, fold: Fold) -> Steps:
            [source], [target] = arrays.sources, arrays.targets
            yield from bound.steps(source, target)
            if fold.divisor > 1:
                divide(target, fold.divisor, out=target)

        return over_all

    def path_of(self, plan: Plan, dtype: np.dtype[Any], op: ReduceOp) -> str:
        """Return by what this rank moves the bytes of a plan, as text."""
        found = []
        if Scope.INTRA in plan.scopes and self.hierarchy.intra.size > 1:
            found.append(f"{'cross-memory attach' if plan.is_direct else self.intra.name} inside the node")
        if Scope.INTER in plan.scopes:
            found.append(f"{self._rails_of(plan, dtype, op)} between nodes")
        if Scope.WORLD in plan.scopes:
            count = plan.count if plan.is_direct else plan.padded(min(plan.chunk_count, plan.count))
            found.append(_IN_ORDER if plan.in_order else self.world.bind(op, dtype, (count,)).name)
        return ", ".join(found)

    def _rails_of(self, plan: Plan, dtype: np.dtype[Any], op: ReduceOp) -> str:
        if plan.in_order or plan.wire_itemsize:
            return _IN_ORDER
        shard, *_ = self.rails
        sizes = {plan.padded(count) // plan.world.num_shards for _, count in plan.chunks}
        return " and ".join(sorted({self._rail(shard, np.empty(size, dtype), op).name for size in sizes}))

    @property
    def scatters(self) -> bool:
        """Whether a true reduce-scatter is possible: by cross-memory attach in each node, by rails that compare calls."""
        return self.device is None and self._reads_peers and self._rails_compare

    def exchange(self, arrays: FlatArrays, fold: Fold, bounds: Sequence[int] | None = None) -> Steps:
        """Return the steps of an all-reduce of the caller's arrays inside the node, or with `bounds` of a reduce-scatter.

        Call `reserve_exchange` before.
        """
        # exchanges order themselves; peers must have read what buckets left in the memory
        slots, window = self.slots, self.intra.window
        if slots.partition != _EXCHANGE_PARTITION:
            slots.repartition(*_EXCHANGE_PARTITION)
            yield from self.intra.fence(slots.last_release)
        if bounds is None:
            yield from self.intra.all_reduce_arrays(arrays, fold)
        else:
            assert window is not None, "it needs shared memory"
            yield from Exchange(window, arrays, fold, bounds).run()
        slots.last_release = self.intra.release()

    def reserve_exchange(self, num_arrays: int) -> None:
        """Enlarge the scratch memory to what an `Exchange` of so many arrays needs: see `reserve`."""
        if self.intra.window is not None:
            self.reserve(exchange_bytes(num_arrays))

    def reserve(self, nbytes: int) -> None:
        """Enlarge the scratch memory if it is too small, and unbind all plans: a collective call in that case.

        Where a node has too little shared memory for it, all ranks go on over MPI, unless a setting asks for shared memory.
        """
        if nbytes <= self._arena.nbytes:
            return
        for bound in self.bound_plans:
            bound.unbind()
        self.bound_plans.clear()
        wait_for(self.hierarchy.intra.comm.Ibarrier())
        held_bytes, self._arena = self._arena.nbytes, np.empty(0, np.uint8)
        self.intra.close()
        self.slots = Slots()
        self.generation += 1
        refusal: TransportError | None = None
        try:
            self._arena = self.intra.allocate(nbytes)
        except TransportError as error:
            refusal = error
        if not all_agree(self.hierarchy.world_group.comm, refusal is None):
            self._go_on(refusal, nbytes, held_bytes)

    def _inside(self, verb: Verb, dtype: np.dtype[Any], op: ReduceOp) -> Transport:
        """Return the transport for a verb inside the node on such values."""
        return self.intra

    def _rail(self, shard: int, part: Array, op: ReduceOp) -> Transport:
        """Return the transport along a rail for such a part of a buffer."""
        return (self.transports.small_rails if part.nbytes < SMALL_RAIL_BYTES else self.rails)[shard]

    def _over_all(self, dtype: np.dtype[Any], op: ReduceOp) -> Transport:
        """Return the transport over all ranks for such values."""
        return self.world

    def _in_order(self, group: Group, buffer: Array, op: ReduceOp, channel: int, wire: np.dtype[Any] | None) -> Operation:
        """Bind an all-reduce of one buffer per rank, in the order of the ranks."""
        return ordered_all_reduce(group, buffer, op, channel, wire)

    def _go_on(self, refusal: TransportError | None, nbytes: int, held_bytes: int) -> None:
        """Go on over MPI where a node has too little memory; if a setting asks for shared memory, raise on all ranks."""
        self._arena = np.empty(0, np.uint8)
        self.intra.close()
        wanted = self.hierarchy.settings[settings.INTRA_TRANSPORT]
        if self.device is None and wanted == "auto":
            if refusal is not None:
                warn_of_next(self.hierarchy.intra, str(refusal), MpiTransport.name)
            # the memory of barriers and small arrays stays, until `close`
            self.intra, self._reads_peers, self._compares_inside = MpiTransport(self.hierarchy.intra), False, False
            self._arena = self.intra.allocate(nbytes)
            return
        if held_bytes:
            self._arena = self.intra.allocate(held_bytes)
        raise refusal or TransportError("another node has too little memory; its ranks say how much")

    def close(self) -> None:
        """Free the scratch memory and the transports. A collective call."""
        self.world.close()
        # ranks of several rails dispose of them in increasing order, so that they cannot deadlock
        for transport in (self.transports.intra, *self.rails.values()):  # small rails are these, or hold nothing
            transport.dispose()


def _bind(transport: Transport, verb: Verb, buffer: Array, bounds: list[int], op: ReduceOp) -> Operation:
    """Bind a verb inside the node."""
    if verb is Verb.REDUCE_SCATTER:
        return transport.reduce_scatter(buffer, bounds, op)
    if verb is Verb.ALL_GATHER:
        return transport.all_gather(buffer, bounds)
    return transport.all_reduce(buffer, op)


@cache
def keep_freed_memory() -> None:
    """Make malloc keep what is freed, up to 64 MiB, instead of returning it to the system; `new_array` keeps larger ones.

    Otherwise a collective that returns a new array of 1 MiB takes 257 page faults for the result, and as many for the buffer
    that MPI allocates and frees in each call. glibc raises its limits by itself once a block of up to 32 MiB has been freed
    (mallopt(3), M_MMAP_THRESHOLD), so one is allocated and freed here, untouched. That has no effect with another malloc, or if
    the user has set MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_.
    """
    with suppress(MemoryError):
        np.empty(MALLOC_REUSES_BYTES, np.uint8)
