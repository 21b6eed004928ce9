"""ExchangeVerbs: the verbs that move arrays without combining them, and the way into every collective call.

Numbers of any dtype travel as bytes. What the ranks must know of each other's arrays they tell each other first, so that what
does not fit is refused on all of them before anything moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.communicator.base import Communicator
from mpistrat.communicator.call import Call
from mpistrat.communicator.gather import require_equal, shape_header, shape_of, shape_word
from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.communicator.options import CommunicationOptions, check_options, shared_defaults
from mpistrat.communicator.validate import check_gather, check_parts, check_root
from mpistrat.errors import MpistratError
from mpistrat.execution.executor import Executor
from mpistrat.groups.agreement import Agreement
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.transports.mpi import MpiTransport, until_complete
from mpistrat.transports.pairwise import Pairwise

__all__ = ["ExchangeVerbs"]

Facts = np.ndarray[Any, np.dtype[np.int64]]

_MERGED_KEPT = 64


class ExchangeVerbs(Communicator):
    """The verbs of a communicator over the ranks of a hierarchy, but for those that combine. Making one is a collective call.

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
        self._executor = Executor(hierarchy)
        self._guard = CollectiveGuard(
            hierarchy, agreement, self._executor.intra.window, self._options, lambda: self.num_collectives, self
        )
        self._bytes = MpiTransport(self._group)

    def all_gather(self, array: Array, axis: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Concatenate along `axis`, in replica order: see `Communicator.all_gather`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_gather(array, axis)
            check_dtype(ReduceOp.SUM, array.dtype)

        def facts() -> tuple[int, int]:
            return shape_word(array, axis % array.ndim), array.shape[axis]

        with self._guard:
            text = lambda _: f"({array.dtype}, {array.ndim} axes, axis={axis})"  # noqa: E731 - a name would say no more
            call, found = self._enter("all_gather", text, options, check, facts)
            axis %= array.ndim
            needed = f"all_gather along axis {axis} needs one axis, one dtype and equal extents on all other axes"
            require_equal(found[:, 0], needed, self._group, array)
            extents = [int(extent) for extent in found[:, 1]]
            front = np.moveaxis(array, axis, 0)
            whole = np.empty((sum(extents), *front.shape[1:]), array.dtype)
            starts = np.cumsum([0, *extents])
            whole[starts[self.rank] : starts[self.rank + 1]] = front
            if whole.nbytes:
                row_bytes = whole.nbytes // whole.shape[0]
                bounds = [int(start) * row_bytes for start in starts]
                self._guard.run(call, self._bytes.all_gather(_bytes(whole), bounds).run())
            return np.ascontiguousarray(np.moveaxis(whole, 0, axis))

    def gather(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> list[Array] | None:
        """Collect the arrays of all replicas on one: see `Communicator.gather`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_root(root, self.size)
            check_dtype(ReduceOp.SUM, array.dtype)

        with self._guard:
            text = lambda _: f"({array.dtype}, root={root})"  # noqa: E731
            call, found = self._enter("gather", text, options, check, lambda: (shape_word(array), 0))
            require_equal(found[:, 0], "gather needs equal shapes, one dtype and one root", self._group, array)
            mine, nothing = np.array(array, order="C"), np.empty(0, np.uint8)
            is_root = self.rank == root
            arrived = [np.empty(mine.shape, mine.dtype) if is_root and rank != root else mine for rank in range(self.size)]
            sends = [mine if rank == root else nothing for rank in range(self.size)]
            self._guard.run(call, Pairwise(self._group, sends, arrived if is_root else [nothing] * self.size).run())
            return arrived if is_root else None

    def all_to_all(self, arrays: Sequence[Array], options: CommunicationOptions | None = None) -> list[Array]:
        """Send an array to each replica: see `Communicator.all_to_all`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_parts(arrays, self.size)
            check_dtype(ReduceOp.SUM, arrays[0].dtype)

        def facts() -> tuple[int, int]:
            return shape_word(arrays[0], 0 if arrays[0].ndim else None), 0

        with self._guard:
            text = lambda _: f"({', '.join(sorted({str(array.dtype) for array in arrays}))})"  # noqa: E731
            call, found = self._enter("all_to_all", text, options, check, facts)
            mine = arrays[self.rank]
            needed = "all_to_all needs one dtype, and equal extents on all axes but the first"
            require_equal(found[:, 0], needed, self._group, mine)
            extents = self._exchange_extents(call, arrays)
            arrived = [np.empty((extent, *mine.shape[1:])[: mine.ndim], mine.dtype) for extent in extents]
            np.copyto(arrived[self.rank], mine)
            self._guard.run(call, Pairwise(self._group, [np.ascontiguousarray(array) for array in arrays], arrived).run())
            return arrived

    def broadcast(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Return the array of replica `root`: see `Communicator.broadcast`. A collective call."""
        with self._guard:
            call, _ = self._enter("broadcast", lambda _: f"(root={root})", options, lambda _: check_root(root, self.size))
            header = shape_header(array)
            self._guard.run(call, self._bytes.broadcast(header, root).run())
            shape, dtype = shape_of(header)
            check_dtype(ReduceOp.SUM, dtype, f"the array of replica {root}")
            result = np.array(array, order="C") if self.rank == root else np.empty(shape, dtype)
            if result.nbytes:
                self._guard.run(call, self._bytes.broadcast(_bytes(result), root).run())
            return result

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all replicas have come here. A collective call."""
        with self._guard:
            self._enter("barrier", lambda _: "()", options)

    def agree(self, call: str, error: Exception | None = None, options: CommunicationOptions | None = None) -> None:
        """Check that all replicas pass the same text: see `Communicator.agree`. A collective call."""
        with self._guard:
            entered = self._call(call.partition("(")[0], lambda: call, self._within(options))
            entered.begin()
            self._guard.agree(entered, error)

    def note(self, text: str, options: CommunicationOptions | None = None) -> None:
        """Have a text compared with the next collective, or at once with MPISTRAT_STRICT: see `Communicator.note`."""
        if self.is_strict:
            self.agree(text, None, options)
        else:
            self._guard.note(text)

    def refuse(self, call: str, error: Exception, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise `error`, and let the others know: see `Communicator.refuse`."""
        with self._guard:
            entered = self._call(call, lambda: call, self._within(options))
            entered.begin()
            self._refuse(entered, error)

    def _enter(
        self,
        verb: str,
        arguments: Callable[[CommunicationOptions], str],
        options: CommunicationOptions | None,
        check: Callable[[CommunicationOptions], None] | None = None,
        facts: Callable[[], tuple[int, int]] | None = None,
    ) -> tuple[Call, Facts]:
        """Begin a collective call: check it here, meet the others, compare the calls of all, and learn their facts."""
        call, refused = self._announce(verb, arguments, options, check)
        call.begin()
        if refused is not None:
            self._refuse(call, refused)
        return call, self._guard.agree(call, None, (0, 0) if facts is None else facts())

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

    def _refuse(self, call: Call, error: Exception) -> NoReturn:
        """Raise the error of a call that this rank cannot make; with MPISTRAT_STRICT all ranks raise together."""
        if self.is_strict:
            self._guard.agree(call, error)
        self.num_collectives -= 1  # the others have made none, or wait for this rank to make it
        self._guard.refuse(call, error)

    def _call(self, verb: str, describe: Callable[[], str], options: CommunicationOptions) -> Call:
        self.num_collectives += 1
        call = Call(self.num_collectives, verb, describe, options)
        self._guard.take_notes(call)
        return call

    def _exchange_extents(self, call: Call, arrays: Sequence[Array]) -> list[int]:
        """Return the first extent of the array that each rank sends to this one; 1 for scalars."""
        mine = np.array([array.shape[0] if array.ndim else 1 for array in arrays], np.int64)
        arriving = np.empty_like(mine)
        request = self._group.comm.Ialltoall(mine, arriving)
        self._guard.run(call, until_complete(request, (mine, arriving)))
        return [int(extent) for extent in arriving]

    def _within(self, options: object) -> CommunicationOptions:
        """Return the options of a call, which may not have been checked: what are none the call itself refuses."""
        return self._merge(options) if isinstance(options, CommunicationOptions) else self._options

    def _merge(self, options: CommunicationOptions) -> CommunicationOptions:
        """Return options merged over ours; merging is slow, so the last few are kept."""
        if options not in self._merged:
            if len(self._merged) == _MERGED_KEPT:
                self._merged.clear()
            self._merged[options] = self._options.merge(options)
        return self._merged[options]


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
