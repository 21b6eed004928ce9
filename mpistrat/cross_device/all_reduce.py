"""CrossDeviceOps that reduce by an all-reduce; each class selects an algorithm or a library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat.arrays import as_array, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.sparse import IndexedSlices, all_reduce_slices
from mpistrat.context.values import PerReplica
from mpistrat.cross_device.ops import CrossDeviceOps, current_communicator
from mpistrat.cross_device.pairs import deliver, resolve
from mpistrat.device.binding import bound_device
from mpistrat.errors import TransportError
from mpistrat.reduction import ReduceOp


class HierarchicalAllReduce(CrossDeviceOps):
    """Reduces inside each node, then between nodes, with the algorithm that is fastest for the arrays. Strategies' default.

    Parameters
    ----------
    num_packs : int, optional
        Number of equal packs that the elements of a batch are cut into; the last one takes the remainder. 0: each array is
        reduced separately. None (the default): packs follow `bytes_per_pack` of the options.
    """

    def __init__(self, num_packs: int | None = None) -> None:
        self._options = CommunicationOptions(num_packs=num_packs)

    @property
    def num_packs(self) -> int | None:
        """As given."""
        return self._options.num_packs

    def all_reduce_options(
        self, communicator: BaseCommunicator, options: CommunicationOptions | None
    ) -> CommunicationOptions | None:
        """Return these options, merged over those of this object, unless a subclass reduces in another way."""
        kind, own = type(self), HierarchicalAllReduce
        if kind.reduce_implementation is not own.reduce_implementation:
            return None
        if kind.batch_reduce_implementation is not own.batch_reduce_implementation:
            return None
        self._check(communicator)
        return self._options.merge(options)

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
        self._check(communicator)
        wanted = self._options.merge(options)
        destination_ranks = [resolve(destinations, communicator) for _, destinations in pairs]
        components = [component for value, _ in pairs for component in value.values]
        arrays = [as_array(component) for component in components if not isinstance(component, IndexedSlices)]
        dense = iter(communicator.all_reduce(op, arrays, wanted) if arrays else ())
        results = [
            all_reduce_slices(communicator, op, component, wanted)
            if isinstance(component, IndexedSlices)
            else like(next(dense), component)
            for component in components
        ]
        return [deliver(result, ranks, communicator) for result, ranks in zip(results, destination_ranks, strict=True)]

    def _check(self, communicator: BaseCommunicator) -> None:
        """Raise if the communicator cannot reduce in this way."""


class CollectiveAllReduce(HierarchicalAllReduce):
    """Reduces by one all-reduce over all ranks (algorithm ``flat``), whatever the nodes."""

    def __init__(self, options: CommunicationOptions | None = None, num_packs: int | None = None) -> None:
        check_options(options)
        own = CommunicationOptions(num_packs=num_packs)
        self._options = CommunicationOptions(algorithm="flat").merge(options).merge(own)

    def __repr__(self) -> str:
        return f"CollectiveAllReduce(options={self._options}, num_packs={self.num_packs})"


class HierarchicalCopyAllReduce(HierarchicalAllReduce):
    """Reduces inside one node by a reduce-scatter and an all-gather."""

    def __init__(self, num_packs: int = 1) -> None:
        self._options = CommunicationOptions(algorithm="hierarchical", num_packs=num_packs)

    def _check(self, communicator: BaseCommunicator) -> None:
        if communicator.world.num_nodes > 1:
            raise NotImplementedError(
                f"HierarchicalCopyAllReduce reduces over the ranks of one node, but these replicas are {communicator.world}: "
                "use HierarchicalAllReduce(), which reduces inside nodes and then between them"
            )


class NcclAllReduce(HierarchicalAllReduce):
    """Reduces arrays on GPUs by NCCL."""

    def __init__(self, num_packs: int = 1) -> None:
        self._options = CommunicationOptions(implementation="NCCL", num_packs=num_packs)

    def _check(self, communicator: BaseCommunicator) -> None:
        if bound_device() is None:
            raise TransportError(
                "NcclAllReduce reduces arrays in GPU memory, but these replicas compute in host memory: use "
                "HierarchicalAllReduce(), the default, or ReductionToOneDevice()"
            )
