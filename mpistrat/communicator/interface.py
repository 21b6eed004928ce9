"""BaseCommunicator: what strategies and variables communicate through, whether there are several replicas or one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

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

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Arrays", "BaseCommunicator"]

Arrays = TypeVar("Arrays", bound="Array | list[Array]")
"""An array, or a list of arrays: what comes back is what came in."""


class BaseCommunicator(ABC):
    """The verbs, and what is known of the replicas: `mpistrat.Communicator` says what each verb does.

    Attributes
    ----------
    world : World
        The placement of the ranks on nodes.
    rank, size : int
        This replica, and the number of replicas.
    timeline : Timeline
        Records the phases of each collective while it is enabled.
    is_strict : bool
        Whether everything is compared before a result is handed out, also what `note` and `confirm` leave for later.
    is_closed : bool
        Whether `close` was called: then every verb raises RuntimeError.
    num_packs : int or None
        Cut the elements of a batch into so many equal packs; 0 reduces each array by itself. None packs by `bytes_per_pack`.
        It may be set between calls, on all replicas alike.
    """

    world: World
    rank: int
    size: int
    timeline: Timeline
    is_strict: bool = False
    is_closed: bool = False
    num_packs: int | None = None
    _closed_with = ""

    @property
    def node(self) -> int:
        """The number of this rank's node, from 0; virtual nodes count."""
        return self.world.place(self.rank).node_index

    @property
    def local_rank(self) -> int:
        """The position of this rank among those of its node, from 0."""
        return self.world.place(self.rank).local_rank

    @property
    def path(self) -> str:
        """Which transports arrays on GPUs take, and why not faster ones; empty where replicas compute on CPUs."""
        return ""

    @property
    @abstractmethod
    def num_collectives(self) -> int:
        """Collective calls made so far: the sequence number of the last one."""

    @abstractmethod
    def all_reduce(
        self, op: ReduceOp | str, arrays: Arrays, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Arrays:
        """Combine each array across replicas. A collective call."""

    def all_reduce_again(
        self, op: ReduceOp, arrays: Sequence[Array], noted: int = 0, frames: int = 2, out: Sequence[Array] | None = None
    ) -> list[Array] | None:
        """Do what `all_reduce` does if arrays like these have a fast path already; else do nothing, and return None.

        A collective call. It is for callers that can spare looking at the arrays where the communicator has seen their like.

        Parameters
        ----------
        op, arrays : ReduceOp, sequence of ndarray
            As for `all_reduce`.
        noted : int
            The word of what would be noted before (see `note`), as `groups.agreement.word_of` returns it.
        frames : int
            How many frames of this library lie between this call and the program, at least.
        out : sequence of ndarray, optional
            As for `all_reduce`.
        """
        return None

    @abstractmethod
    def start_all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
        structure: object = None,
    ) -> Work[Arrays]:
        """Start what `all_reduce` does and return its handle. A collective call."""

    @abstractmethod
    def reduce_scatter(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
    ) -> Arrays:
        """Combine each array across replicas; each replica gets its part along `axis`. A collective call."""

    @abstractmethod
    def all_gather(
        self, arrays: Arrays, axis: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Arrays:
        """Concatenate the arrays of all replicas along `axis`, in replica order. A collective call."""

    @abstractmethod
    def gather(self, arrays: Array | list[Array], root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the arrays of all replicas, in replica order, on replica `root`; None elsewhere. A collective call."""

    @abstractmethod
    def all_to_all(self, arrays: Arrays, options: CommunicationOptions | None = None) -> Arrays:
        """Send array i to replica i; return what came from each replica, in replica order. A collective call."""

    @abstractmethod
    def broadcast(
        self, arrays: Arrays, root: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Arrays:
        """Return the array of replica `root`, whose shape and dtype count. A collective call."""

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

    def explain(self, arrays: Array | Sequence[Array], options: CommunicationOptions | None = None) -> Explanation:
        """Return what an all-reduce of arrays like these, a sum or a mean, does, and what it took last. Sends nothing."""
        self._require_open()
        for index, array in enumerate(arrays if isinstance(arrays, (list, tuple)) else [arrays]):
            check_dtype(ReduceOp.SUM, array.dtype, f"array {index}")
        return Explanation(self.world)

    def memory_report(self) -> MemoryReport:
        """Return what this rank holds to communicate: nothing, where nothing is sent."""
        self._require_open()
        return MemoryReport(self.rank)

    def close(self, owner: str = "") -> None:
        """Free what the communicator holds; closing again does nothing. A collective call.

        Parameters
        ----------
        owner : str
            The strategy that is closed, for the error of later calls; by default it is the communicator.
        """
        self.is_closed, self._closed_with = True, owner

    def _require_open(self) -> None:
        if self.is_closed:
            kind, line = ("strategy", "strategy.run(step)") if self._closed_with else ("communicator", "comm.barrier()")
            name = "strategy" if self._closed_with else "comm"
            raise RuntimeError(
                f"this {kind} was closed: {self._closed_with or repr(self)} cannot communicate any more.\n"
                f"    incorrect:  {name}.close(); {line}\n"
                f"    correct:    {line}; {name}.close(), once, after the last call"
            )

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # to close takes all ranks, and who has raised cannot know of the others
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}({self.size}), world={self.world.shape})"
