"""LocalCommunicator: a communicator of one replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.algorithms.choose import Choice
from mpistrat.arrays import Array
from mpistrat.communicator.base import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.validate import apart, check_gather, check_out, check_parts, check_root
from mpistrat.execution.work import Work
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.timeline import Timeline
from mpistrat.topology.world import World

__all__ = ["LocalCommunicator"]


class LocalCommunicator(Communicator):
    """The operations of a single replica: nothing is sent and MPI is not started."""

    def __init__(self) -> None:
        self.world = World.from_shape("1x1")
        self.rank, self.size = 0, 1
        self.timeline = Timeline()

    def all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Copy: the combination of one component is the component."""
        self.num_collectives += 1
        op = ReduceOp.parse(op)
        for array in arrays:
            check_dtype(op, array.dtype)
        if out is None:
            return [array.copy() for array in arrays]
        results = check_out(out, arrays)
        for target, array in zip(results, apart(arrays, results), strict=True):
            np.copyto(target, array)
        return results

    def start_all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        structure: object = None,
    ) -> Work[list[Array]]:
        """Return a handle that has ended."""
        return Work.ended(self.all_reduce(op, arrays, options, out))

    def reduce_scatter(
        self, op: ReduceOp | str, array: Array, axis: int = 0, options: CommunicationOptions | None = None
    ) -> Array:
        """Return a copy: the one part is all."""
        check_gather(array, axis, "reduce_scatter")
        return self.all_reduce(op, [array], options)[0]

    def all_gather(self, array: Array, axis: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Return a copy, after the checks that several replicas would make."""
        check_gather(array, axis)
        return self._copy(array)

    def gather(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> list[Array]:
        """Return a copy."""
        check_root(root, self.size)
        return [self._copy(array)]

    def all_to_all(self, arrays: Sequence[Array], options: CommunicationOptions | None = None) -> list[Array]:
        """Return copies."""
        check_parts(arrays, self.size)
        return [self._copy(array) for array in arrays]

    def broadcast(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Return a copy."""
        check_root(root, self.size)
        return self._copy(array)

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Count the call and return at once."""
        self.num_collectives += 1

    def agree(self, call: str, error: Exception | None = None, options: CommunicationOptions | None = None) -> None:
        """Agree with nobody else."""
        if error is not None:
            raise error

    def choose(self, count: int, dtype: np.dtype[np.generic], options: CommunicationOptions | None = None) -> Choice | None:
        """Return None."""
        return None

    def _copy(self, array: Array) -> Array:
        self.num_collectives += 1
        check_dtype(ReduceOp.SUM, array.dtype)
        copied: Array = array.copy()
        return copied
