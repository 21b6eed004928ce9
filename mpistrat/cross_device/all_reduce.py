"""The family that combines by an all-reduce: which algorithm each class of it asks for, and what it declines."""

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
    """Combines inside each node, then between nodes, as suits the arrays best: what strategies use by themselves.

    Parameters
    ----------
    num_packs : int, optional
        Cut the elements of a batch into so many equal packs, of which the last takes the remainder; 0 reduces each array by
        itself. None (the default) packs by the options' `bytes_per_pack`.

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
        """Combine one value: see `CrossDeviceOps.reduce_implementation`. A collective call."""
        return self._all_reduce(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[PerReplica, Any]], options: CommunicationOptions
    ) -> list[Any]:
        """Combine many values as one batch: see `CrossDeviceOps.batch_reduce_implementation`. A collective call."""
        return self._all_reduce(reduce_op, value_destination_pairs, options)

    def _all_reduce(self, op: ReduceOp, pairs: Sequence[tuple[PerReplica, Any]], options: CommunicationOptions) -> list[Any]:
        communicator = current_communicator()
        wanted = self._preference(communicator).merge(options)
        landing = [resolve(destinations, communicator) for _, destinations in pairs]
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
        return [deliver(result, ranks, communicator) for result, ranks in zip(results, landing, strict=True)]

    def _preference(self, communicator: BaseCommunicator) -> CommunicationOptions:
        """Return the options that this class stands for; those of a call win."""
        return CommunicationOptions()


class CollectiveAllReduce(HierarchicalAllReduce):
    """Combines over all ranks at once, by the all-reduce of MPI, nodes or not.

    Parameters
    ----------
    options : CommunicationOptions, optional
        How to communicate where a call does not say.
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
    """Combines inside one node: each rank sums its share of the elements, then all collect the shares.

    Parameters
    ----------
    num_packs : int
        As for `HierarchicalAllReduce`.

    Raises
    ------
    InvalidArgumentError
        If `num_packs` is negative.
    NotImplementedError
        When it is used, on all replicas, if they are on several nodes.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)

    def _preference(self, communicator: BaseCommunicator) -> CommunicationOptions:
        if communicator.world.num_nodes > 1:
            raise NotImplementedError(
                f"HierarchicalCopyAllReduce combines the ranks of one node, and these replicas are {communicator.world}: use "
                "HierarchicalAllReduce(), which combines inside nodes and then between them"
            )
        return CommunicationOptions(algorithm="hierarchical")


class NcclAllReduce(HierarchicalAllReduce):
    """Combines arrays on GPUs by NCCL.

    Parameters
    ----------
    num_packs : int
        As for `HierarchicalAllReduce`.

    Raises
    ------
    InvalidArgumentError
        If `num_packs` is negative.
    TransportError
        When it is used, on all replicas, if these compute in host memory, if NCCL does not serve on one of their nodes, or if
        it does not combine such values.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)

    def _preference(self, communicator: BaseCommunicator) -> CommunicationOptions:
        if bound_device() is None:
            raise TransportError(
                "NcclAllReduce combines arrays in the memory of GPUs, and these replicas compute in host memory: use "
                "HierarchicalAllReduce(), the default, or ReductionToOneDevice()"
            )
        return CommunicationOptions(implementation="NCCL")


@contextmanager
def _packed(communicator: BaseCommunicator, num_packs: int | None) -> Iterator[None]:
    """Cut batches into `num_packs` for a while; None leaves it to the strategy."""
    before = communicator.num_packs
    if num_packs is not None:  # setting it, even to what it is, costs the communicator what it remembers
        communicator.num_packs = num_packs
    try:
        yield
    finally:
        if num_packs is not None:
            communicator.num_packs = before
