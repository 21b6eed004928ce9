"""CrossDeviceOps that reduce by an all-reduce; each class selects an algorithm or a library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpistrat.arrays import as_array, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.sparse import IndexedSlices, all_reduce_slices
from mpistrat.context.values import PerReplica
from mpistrat.cross_device.destinations import deliver, resolve
from mpistrat.cross_device.ops import CrossDeviceOps, current_communicator
from mpistrat.device.binding import bound_device
from mpistrat.errors import InvalidArgumentError, TransportError
from mpistrat.reduction import ReduceOp

__all__ = ["CollectiveAllReduce", "HierarchicalAllReduce", "HierarchicalCopyAllReduce", "NcclAllReduce"]


class HierarchicalAllReduce(CrossDeviceOps):
    """Reduces inside each node, then between nodes, with the algorithm that is fastest for the arrays. Strategies' default.

    Parameters
    ----------
    num_packs : int, optional
        Number of equal packs that the elements of a batch are cut into; the last one takes the remainder. 0: each array is
        reduced separately. None (the default): packs follow `bytes_per_pack` of the options.

    Raises
    ------
    InvalidArgumentError
        If `num_packs` is negative.
    """

    def __init__(self, num_packs: int | None = None) -> None:
        if num_packs is not None and num_packs < 0:
            raise InvalidArgumentError(f"num_packs must be None, 0 (each array by itself) or positive; got {num_packs}")
        self.num_packs = num_packs

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Reduce one value: see `CrossDeviceOps.reduce_implementation`. A collective call."""
        return self._all_reduce(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[PerReplica, Any]], options: CommunicationOptions
    ) -> list[Any]:
        """Reduce many values as one batch: see `CrossDeviceOps.batch_reduce_implementation`. A collective call."""
        return self._all_reduce(reduce_op, value_destination_pairs, options)

    def _all_reduce(self, op: ReduceOp, pairs: Sequence[tuple[PerReplica, Any]], options: CommunicationOptions) -> list[Any]:
        communicator = current_communicator()
        wanted = self._preference(communicator).merge(options)
        destination_ranks = [resolve(destinations, communicator) for _, destinations in pairs]
        components = [component for value, _ in pairs for component in value.values]
        arrays = [as_array(component) for component in components if not isinstance(component, IndexedSlices)]
        with _packed(communicator, self.num_packs):
            dense = iter(communicator.all_reduce(op, arrays, wanted) if arrays else ())
        results = [
            all_reduce_slices(communicator, op, component, wanted)
            if isinstance(component, IndexedSlices)
            else like(next(dense), component)
            for component in components
        ]
        return [deliver(result, ranks, communicator) for result, ranks in zip(results, destination_ranks, strict=True)]

    def _preference(self, communicator: BaseCommunicator) -> CommunicationOptions:
        """Return the options that this class sets; the options of a call take precedence."""
        return CommunicationOptions()


class CollectiveAllReduce(HierarchicalAllReduce):
    """Reduces by one all-reduce over all ranks (algorithm ``flat``), whatever the nodes.

    Parameters
    ----------
    options : CommunicationOptions, optional
        Defaults; the options of a call take precedence.
    num_packs : int, optional
        As for `HierarchicalAllReduce`.

    Raises
    ------
    InvalidArgumentError
        If `num_packs` is negative, or the options are not CommunicationOptions.
    """

    def __init__(self, options: CommunicationOptions | None = None, num_packs: int | None = None) -> None:
        super().__init__(num_packs)
        check_options(options)
        self._options = CommunicationOptions(algorithm="flat").merge(options)

    def __repr__(self) -> str:
        return f"CollectiveAllReduce(options={self._options}, num_packs={self.num_packs})"

    def _preference(self, communicator: BaseCommunicator) -> CommunicationOptions:
        return self._options


class HierarchicalCopyAllReduce(HierarchicalAllReduce):
    """Reduces inside one node by a reduce-scatter and an all-gather.

    Parameters
    ----------
    num_packs : int
        As for `HierarchicalAllReduce`.

    Raises
    ------
    InvalidArgumentError
        If `num_packs` is negative.
    NotImplementedError
        On use, on all replicas, if they are on several nodes.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)

    def _preference(self, communicator: BaseCommunicator) -> CommunicationOptions:
        if communicator.world.num_nodes > 1:
            raise NotImplementedError(
                f"HierarchicalCopyAllReduce reduces over the ranks of one node, but these replicas are {communicator.world}: "
                "use HierarchicalAllReduce(), which reduces inside nodes and then between them"
            )
        return CommunicationOptions(algorithm="hierarchical")


class NcclAllReduce(HierarchicalAllReduce):
    """Reduces arrays on GPUs by NCCL.

    Parameters
    ----------
    num_packs : int
        As for `HierarchicalAllReduce`.

    Raises
    ------
    InvalidArgumentError
        If `num_packs` is negative.
    TransportError
        On use, on all replicas, if they compute in host memory, if NCCL cannot be used on one of their nodes, or if it does not
        support the dtype or the operation.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)

    def _preference(self, communicator: BaseCommunicator) -> CommunicationOptions:
        if bound_device() is None:
            raise TransportError(
                "NcclAllReduce reduces arrays in GPU memory, but these replicas compute in host memory: use "
                "HierarchicalAllReduce(), the default, or ReductionToOneDevice()"
            )
        return CommunicationOptions(implementation="NCCL")


@contextmanager
def _packed(communicator: BaseCommunicator, num_packs: int | None) -> Iterator[None]:
    """Set the number of packs of a communicator for the time of a ``with`` block; None leaves it unchanged."""
    before = communicator.num_packs
    if num_packs is not None:  # setting it, even to the same value, clears the plan cache of the communicator
        communicator.num_packs = num_packs
    try:
        yield
    finally:
        if num_packs is not None:
            communicator.num_packs = before
