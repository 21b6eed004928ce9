"""ExchangeVerbs: the verbs that move arrays without combining them, and the way into every collective call.

Numbers of any dtype travel as bytes. What the ranks must know of each other's arrays they tell each other first, so that what
does not fit is refused on all of them before anything moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.cross_device.arguments import check_gather, check_parts, check_root
from mpistrat.cross_device.collectives import Collectives
from mpistrat.cross_device.gate import Call, Gate
from mpistrat.cross_device.gather import check_equal, gather_extents, incoming_extents
from mpistrat.cross_device.options import CommunicationOptions, check_options, shared_defaults
from mpistrat.errors import MpistratError
from mpistrat.groups.agreement import Agreement
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.transports.mpi import MpiTransport
from mpistrat.transports.pairwise import Pairwise

__all__ = ["ExchangeVerbs"]

_MERGED_KEPT = 64


class ExchangeVerbs(Collectives):
    """Collectives over the ranks of a hierarchy, but for those that combine. Making one is a collective call.

    Parameters
    ----------
    hierarchy : Hierarchy
        The groups to work on.
    options : CommunicationOptions or None
        Hold for every call that does not say otherwise.
    """

    def __init__(self, hierarchy: Hierarchy, options: CommunicationOptions | None) -> None:
        self.hierarchy = hierarchy
        self.world, self.rank, self.size = hierarchy.world, hierarchy.rank, hierarchy.world.size
        self.is_strict = settings.STRICT.read()
        self._group = hierarchy.world_group
        agreement = Agreement(self._group)
        self._options = shared_defaults(agreement).merge(options)
        self._merged: dict[CommunicationOptions, CommunicationOptions] = {}
        self._gate = Gate(hierarchy, agreement, self)
        self._bytes = MpiTransport(self._group)

    def all_gather(self, array: Array, axis: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Concatenate along `axis`, in replica order: see `Collectives.all_gather`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_gather(array, axis)
            check_dtype(ReduceOp.SUM, array.dtype)

        call = self._enter("all_gather", lambda _: f"({array.dtype}, {array.ndim} axes, axis={axis})", options, check)
        axis %= array.ndim
        extents = gather_extents(self._group, array, axis)
        front = np.moveaxis(array, axis, 0)
        whole = np.empty((sum(extents), *front.shape[1:]), array.dtype)
        starts = np.cumsum([0, *extents])
        whole[starts[self.rank] : starts[self.rank + 1]] = front
        if whole.nbytes:
            row_bytes = whole.nbytes // whole.shape[0]
            bounds = [int(start) * row_bytes for start in starts]
            self._gate.run(call, self._bytes.all_gather(_bytes(whole), bounds).run())
        return np.ascontiguousarray(np.moveaxis(whole, 0, axis))

    def gather(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> list[Array] | None:
        """Collect the arrays of all replicas on one: see `Collectives.gather`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_root(root, self.size)
            check_dtype(ReduceOp.SUM, array.dtype)

        call = self._enter("gather", lambda _: f"({array.dtype} {array.shape}, root={root})", options, check)
        check_equal(self._group, array, root)
        mine, nothing = np.array(array, order="C"), np.empty(0, np.uint8)
        is_root = self.rank == root
        arrived = [np.empty(mine.shape, mine.dtype) if is_root and rank != root else mine for rank in range(self.size)]
        sends = [mine if rank == root else nothing for rank in range(self.size)]
        self._gate.run(call, Pairwise(self._group, sends, arrived if is_root else [nothing] * self.size).run())
        return arrived if is_root else None

    def all_to_all(self, arrays: Sequence[Array], options: CommunicationOptions | None = None) -> list[Array]:
        """Send an array to each replica: see `Collectives.all_to_all`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_parts(arrays, self.size)
            check_dtype(ReduceOp.SUM, arrays[0].dtype)

        call = self._enter(
            "all_to_all", lambda _: f"({', '.join(sorted({str(array.dtype) for array in arrays}))})", options, check
        )
        mine = arrays[self.rank]
        arrived = [
            np.empty((extent, *mine.shape[1:])[: mine.ndim], mine.dtype) for extent in incoming_extents(self._group, arrays)
        ]
        np.copyto(arrived[self.rank], mine)
        self._gate.run(call, Pairwise(self._group, [np.ascontiguousarray(array) for array in arrays], arrived).run())
        return arrived

    def broadcast(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Return the array of replica `root`: see `Collectives.broadcast`. A collective call."""
        call = self._enter("broadcast", lambda _: f"(root={root})", options, lambda _: check_root(root, self.size))
        shape, dtype = self._group.comm.bcast((array.shape, array.dtype), root)
        check_dtype(ReduceOp.SUM, dtype, f"the array of replica {root}")
        result = np.array(array, order="C") if self.rank == root else np.empty(shape, dtype)
        if result.nbytes:
            self._gate.run(call, self._bytes.broadcast(_bytes(result), root).run())
        return result

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all replicas have come here. A collective call."""
        call = self._enter("barrier", lambda _: "()", options)
        # in strict mode and under a deadline all have met already
        if not (self.is_strict or call.ends):
            self._group.comm.Barrier()

    def agree(self, call: str, error: Exception | None = None) -> None:
        """Check that all replicas pass the same text: see `Collectives.agree`. A collective call."""
        self._gate.require_open()
        self._gate.agree(self._call(call.partition("(")[0], lambda: call, self._options), error)

    def _enter(
        self,
        verb: str,
        arguments: Callable[[CommunicationOptions], str],
        options: CommunicationOptions | None,
        check: Callable[[CommunicationOptions], None] | None = None,
    ) -> Call:
        """Begin a collective call: check it here, meet the others, and compare the calls of all, as far as is asked for."""
        self._gate.require_open()
        call, refused = self._announce(verb, arguments, options, check)
        self._meet(call, refused)
        return call

    def _announce(
        self,
        verb: str,
        arguments: Callable[[CommunicationOptions], str],
        options: CommunicationOptions | None,
        check: Callable[[CommunicationOptions], None] | None = None,
    ) -> tuple[Call, Exception | None]:
        """Return a collective call with its number, and why this rank cannot make it, as far as can be told here."""
        wanted, refused = self._options, None
        try:
            check_options(options)
            wanted = self._options if options is None else self._merge(options)
            if check is not None:
                check(wanted)
        except (MpistratError, TypeError) as error:
            refused = error
        return self._call(verb, lambda: verb + arguments(wanted), wanted), refused

    def _meet(self, call: Call, refused: Exception | None = None) -> None:
        """Let the time of a call run, meet the other ranks, and compare the calls of all, as far as is asked for."""
        call.begin()
        if self.is_strict:
            self._gate.agree(call, refused)
        if refused is not None:
            raise refused
        if call.ends and not self.is_strict:
            self._gate.arrive(call)

    def _call(self, verb: str, describe: Callable[[], str], options: CommunicationOptions) -> Call:
        self.num_collectives += 1
        return Call(self.num_collectives, verb, describe, options)

    def _merge(self, options: CommunicationOptions) -> CommunicationOptions:
        """Return options merged over ours; merging is slow, so the last few are kept."""
        if options not in self._merged:
            if len(self._merged) == _MERGED_KEPT:
                self._merged.clear()
            self._merged[options] = self._options.merge(options)
        return self._merged[options]


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
