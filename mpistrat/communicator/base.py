"""Communicator: arrays in, arrays out, over all replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from mpistrat.algorithms.choose import Choice
from mpistrat.arrays import Array
from mpistrat.communicator.explain import Explanation
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.execution.memory import MemoryReport
from mpistrat.execution.work import Work
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.timeline import Timeline
from mpistrat.topology.world import World

__all__ = ["Communicator"]


class Communicator(ABC):
    """What a strategy communicates through.

    Every verb takes options that win over those the communicator was made with. With a deadline (`timeout_seconds`) a verb
    raises DeadlineExceededError on every replica that has come, naming those that have not, and no collective is made any more.

    Replicas compare their calls. Every verb raises AgreementError on all of them if they make different ones, or pass different
    operations, shapes, dtypes or options that must agree: before a result is handed out, but for what `confirm` compares.

    Attributes
    ----------
    world : World
        Which replica sits where.
    rank, size : int
        This replica, and the number of replicas.
    timeline : Timeline
        Records the phases of each collective while it is enabled.
    is_strict : bool
        Whether everything is compared before a result is handed out, also what `note` and `confirm` leave for later.
    num_collectives : int
        Collective calls made so far: the sequence number of the last one.
    num_packs : int or None
        Cut the elements of a batch into so many equal packs; 0 reduces each array by itself. None packs by `bytes_per_pack`.
        It may be set between calls, on all replicas alike.
    """

    world: World
    rank: int
    size: int
    timeline: Timeline
    is_strict: bool = False
    num_collectives: int = 0
    num_packs: int | None = None

    @abstractmethod
    def all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Combine each array across replicas. A collective call.

        Parameters
        ----------
        op : ReduceOp or str
            How to combine; MEAN is SUM and one division by the number of replicas.
        arrays : sequence of ndarray
            Any shapes and dtypes that `reduction` accepts, contiguous or not; the same on all replicas.
        options : CommunicationOptions, optional
            Win over the options these operations were made with.
        out : sequence of ndarray, optional
            C-contiguous arrays of equal shapes and dtypes to write to; they may be `arrays` themselves.

        Returns
        -------
        list of ndarray
            `out`, or new arrays; never the arrays that came in.
        """

    def all_reduce_again(self, op: ReduceOp, arrays: Sequence[Array], noted: int = 0, frames: int = 2) -> list[Array] | None:
        """Do what `all_reduce` does if arrays like these have a short way already; else do nothing, and return None.

        A collective call. It is for callers that can spare looking at the arrays where the communicator has seen their like.

        Parameters
        ----------
        op, arrays : ReduceOp, sequence of ndarray
            As for `all_reduce`.
        noted : int
            The word of what would be noted before (see `note`), as `groups.agreement.word_of` returns it.
        frames : int
            How many frames of this library lie between this call and the program, at least.
        """
        return None

    @abstractmethod
    def start_all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        structure: object = None,
    ) -> Work[list[Array]]:
        """Start what `all_reduce` does and return its handle. A collective call.

        What was started goes on while the program computes, one after the other in the order of the calls; any other
        collective begins when all that was started before has ended. Until then `arrays` and `out` must be left alone. A
        deadline counts from when the turn of the operation comes. What is refused by one replica alone is raised here; all
        that is found out together with the others, such as that calls differ, is raised by the handle.

        Parameters
        ----------
        op : ReduceOp
            As for `all_reduce`.
        arrays : sequence of ndarray
            Likewise.
        options : CommunicationOptions, optional
            Likewise.
        out : sequence of ndarray, optional
            Likewise.
        structure : object, optional
            Of the value whose leaves the arrays are: its text must be the same on all replicas.
        """

    @abstractmethod
    def reduce_scatter(
        self, op: ReduceOp | str, array: Array, axis: int = 0, options: CommunicationOptions | None = None
    ) -> Array:
        """Combine arrays of one shape across replicas; each replica gets its part along `axis`. A collective call.

        Parts are in replica order, as equal as can be, the first ones longer by one.

        Raises
        ------
        InvalidArgumentError
            If the array has no axes, or `axis` is out of range.
        UnsupportedDtypeError
            If `op` is not defined for the dtype.
        """

    @abstractmethod
    def all_gather(self, array: Array, axis: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Concatenate the arrays of all replicas along `axis`, in replica order. A collective call.

        Extents along `axis` may differ; all others, and the dtype, must agree.

        Raises
        ------
        InvalidArgumentError
            If the array has no axes, `axis` is out of range, or shapes or dtypes do not fit: on every replica.
        """

    @abstractmethod
    def gather(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> list[Array] | None:
        """Return the arrays of all replicas, in replica order, on replica `root`; None elsewhere. A collective call.

        Raises
        ------
        InvalidArgumentError
            If `root` is not a replica, or shapes or dtypes differ: on every replica.
        """

    @abstractmethod
    def all_to_all(self, arrays: Sequence[Array], options: CommunicationOptions | None = None) -> list[Array]:
        """Send array i to replica i; return what came from each replica, in replica order. A collective call.

        All arrays have one dtype and agree in all extents but the first.

        Raises
        ------
        InvalidArgumentError
            If there is not one array for each replica, or they do not fit.
        """

    @abstractmethod
    def broadcast(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Return the array of replica `root`, whose shape and dtype count. A collective call.

        Raises
        ------
        InvalidArgumentError
            If `root` is not a replica.
        """

    @abstractmethod
    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until all replicas have come here. A collective call."""

    @abstractmethod
    def agree(self, call: str, error: Exception | None = None, options: CommunicationOptions | None = None) -> None:
        """Check at once that all replicas pass the same text. A collective call.

        It has the deadline of `options`, which are those of the call that replicas agree on, checked or not.

        Raises
        ------
        AgreementError
            On every replica, if they do not; on one that passes an `error`, that error.
        """

    def note(self, text: str, options: CommunicationOptions | None = None) -> None:  # noqa: B027 - one replica agrees with itself
        """Have a text compared with the next collective, which replicas make alike only if all have noted the same.

        With MPISTRAT_STRICT it is compared at once, as by `agree`: a collective call, with the deadline of `options`.
        """

    def confirm(self) -> None:  # noqa: B027 - as for `note`
        """Compare the calls that were not compared when they were made: those in which MPI combined arrays between nodes.

        A collective call where there are such. Every 64 small calls it is made by itself, more often after long ones, and by
        `close` and at the end of the program; with MPISTRAT_STRICT after each.

        Raises
        ------
        AgreementError
            On every replica, if they differ.
        """

    def refuse(self, call: str, error: Exception, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise `error`, of a replica that cannot make the call, and let the others know, which make it.

        They raise AgreementError. With MPISTRAT_STRICT a collective call, in which all raise together, with the deadline of
        `options`, as for `agree`.
        """
        raise error

    @abstractmethod
    def choose(self, count: int, dtype: np.dtype[np.generic], options: CommunicationOptions | None = None) -> Choice | None:
        """Return the plan, and why, for an all-reduce of `count` elements; None where nothing is sent."""

    def explain(self, num_bytes: int, dtype: np.dtype[np.generic]) -> str:
        """Return in a few lines which plan an all-reduce of so many bytes takes, and why."""
        choice = self.choose(num_bytes // dtype.itemsize, dtype)
        if choice is None:
            return "one replica: nothing is sent"
        return f"{choice.plan}\n{choice.reason}"

    def explain_batch(self, arrays: Sequence[Array], options: CommunicationOptions | None = None) -> Explanation:
        """Return what an all-reduce of arrays like these, a sum or a mean, does, and what it took last. Sends nothing.

        Raises
        ------
        UnsupportedDtypeError, TransportError, InvalidArgumentError
            As `all_reduce` would, where the arrays cannot be combined as the options say.
        """
        for index, array in enumerate(arrays):
            check_dtype(ReduceOp.SUM, array.dtype, f"array {index}")
        return Explanation(self.world)

    def memory_report(self) -> MemoryReport:
        """Return what this rank holds to communicate: nothing, where nothing is sent."""
        return MemoryReport(self.rank)

    def close(self) -> None:  # noqa: B027 - a single replica holds nothing
        """Free what the operations hold. A collective call."""
