"""LocalCommunicator: a communicator of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.algorithms.choose import Choice
from mpistrat.arrays import Array
from mpistrat.communicator.interface import Arrays, BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.validate import alike, check_gather, check_parts, check_root, check_target, copy_overlapping
from mpistrat.execution.work import Work
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.timeline import Timeline
from mpistrat.topology.world import World

__all__ = ["LocalCommunicator"]


class LocalCommunicator(BaseCommunicator):
    """The collectives of a single replica: nothing is sent and MPI is not started."""

    def __init__(self) -> None:
        self.world = World.from_shape("1x1")
        self.rank, self.size = 0, 1
        self.timeline = Timeline()
        self._number = 0

    @property
    def num_collectives(self) -> int:
        """Collective calls made so far."""
        return self._number

    def all_reduce(
        self, op: ReduceOp | str, arrays: Arrays, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
        """Return a copy."""
        self._count()
        op = ReduceOp.parse(op)
        given: Any = arrays
        targets: Any = out
        if is_one := not isinstance(given, (list, tuple)):
            given, targets = [given], None if out is None else [out]
        sources, memory = self._read("all_reduce", given, targets, options)
        results = alike(self._copies(op, sources, memory), given, targets)
        return results[0] if is_one else results

    def start_all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
        structure: object = None,
    ) -> Work[Any]:
        """Return a completed handle."""
        return Work.ended(self.all_reduce(op, arrays, options, out))

    def reduce_scatter(
        self,
        op: ReduceOp | str,
        arrays: Arrays,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        out: Arrays | None = None,
    ) -> Any:
        """Return a copy."""

        def part(array: Array, target: Array | None) -> Array:
            check_gather(array, axis, "reduce_scatter")
            copied: Array = self.all_reduce(op, array, options, target)
            return copied

        return self._each("reduce_scatter", part, arrays, out)

    def all_gather(
        self, arrays: Arrays, axis: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
        """Return a copy."""

        def whole(array: Array, target: Array | None) -> Array:
            check_gather(array, axis)
            return self._copy(array, target)

        return self._each("all_gather", whole, arrays, out)

    def gather(self, arrays: Array | list[Array], root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return a copy."""
        check_root(root, self.size)
        copies = self._each("gather", lambda array, _: self._copy(array), arrays)
        return [[copied] for copied in copies] if isinstance(arrays, (list, tuple)) else [copies]

    def all_to_all(self, arrays: Arrays, options: CommunicationOptions | None = None) -> Any:
        """Return copies."""
        is_list = isinstance(arrays, (list, tuple))
        given: Any = arrays if is_list else [arrays]
        sources, _ = self._read("all_to_all", given, None, options)
        if is_list:
            check_parts(sources, self.size)
        else:
            check_gather(sources[0], 0, "all_to_all")
        results = alike(list(map(self._copy, sources)), given, None)
        return results if is_list else results[0]

    def broadcast(
        self, arrays: Arrays, root: int = 0, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
        """Return a copy."""
        check_root(root, self.size)
        return self._each("broadcast", self._copy, arrays, out)

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Return at once."""
        self._count()

    def agree(self, call: str, error: Exception | None = None, options: CommunicationOptions | None = None) -> None:
        """Raise `error`, if there is one."""
        self._require_open()
        if error is not None:
            raise error

    def choose(self, count: int, dtype: np.dtype[np.generic], options: CommunicationOptions | None = None) -> Choice | None:
        """Return None."""
        self._require_open()
        return None

    def _count(self) -> None:
        self._require_open()
        self._number += 1

    def _copies(self, op: ReduceOp, arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
        for array in arrays:
            check_dtype(op, array.dtype)
        if out is None:
            return [array.copy() for array in arrays]
        for target, array in zip(out, arrays, strict=True):
            check_target(target, array)
        for target, array in zip(out, copy_overlapping(arrays, out), strict=True):
            np.copyto(target, array)
        return list(out)

    def _copy(self, array: Array, target: Array | None = None) -> Array:
        self._count()
        return self._copies(ReduceOp.SUM, [array], None if target is None else [target])[0]
