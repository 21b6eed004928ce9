"""LocalCommunicator: a communicator of one replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, array_module, copy_overlapping
from mpistrat.communicator.interface import Arrays, BaseCommunicator, as_lists
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.validate import alike, check_gather, check_parts, check_target, checked_index
from mpistrat.reduction import ReduceOp, check_dtype, check_elements
from mpistrat.timeline import Timeline
from mpistrat.topology.world import World


class LocalCommunicator(BaseCommunicator):
    """The collectives of a single replica: nothing is sent and MPI is not started."""

    def __init__(self) -> None:
        self.world = World.from_shape("1x1")
        self.rank, self.size = 0, 1
        self.timeline = Timeline()
        self._number = 0
        self._movement = _Copies(self._count)

    @property
    def num_collectives(self) -> int:
        return self._number

    def all_reduce(
        self, op: ReduceOp | str, arrays: Arrays, options: CommunicationOptions | None = None, out: Arrays | None = None
    ) -> Any:
        """Return a copy."""
        self._count(options)
        op = ReduceOp.parse(op)
        given, targets, is_one = as_lists(arrays, out)
        sources, memory = self._read("all_reduce", given, targets, options)
        for index, source in enumerate(sources):
            check_dtype(op, source.dtype, f"array {index}")
        results = alike(_copies(sources, memory), given, targets)
        return results[0] if is_one else results

    def _reduce_scatter(
        self, op: ReduceOp | str, array: Array, axis: int, options: CommunicationOptions | None, out: Array | None
    ) -> Array:
        check_gather(array, axis, "reduce_scatter")
        copied: Array = self.all_reduce(op, array, options, out)
        return copied

    def _count(self, options: object) -> None:
        self._require_open()
        check_options(options)
        self._number += 1


class _Copies:
    """The verbs that only move arrays, of which each is a copy; `count` counts a call, and checks its options."""

    def __init__(self, count: Callable[[object], None]) -> None:
        self._count = count

    def all_gather(self, array: Array, axis: int, options: object, out: Array | None) -> Array:
        check_gather(array, axis)
        return self._copy(array, options, out)

    def gather(self, array: Array, root: int, options: object) -> list[Array]:
        checked_index(root, "root", 1)
        return [self._copy(array, options)]

    def all_to_all(self, arrays: Sequence[Array], options: object, joins: bool = False) -> list[Array]:
        check_parts(arrays, 1)
        return [self._copy(array, options) for array in arrays]

    def broadcast(self, array: Array, root: int, options: object, out: Array | None) -> Array:
        checked_index(root, "root", 1)
        return self._copy(array, options, out)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        self._count(None)
        array: Array = array_module().empty(shape, dtype)
        return array

    def barrier(self, options: object) -> None:
        self._count(options)

    def _copy(self, array: Array, options: object, target: Array | None = None) -> Array:
        self._count(options)
        check_elements(array.dtype)
        return _copies([array], None if target is None else [target])[0]


def _copies(arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
    if out is None:
        return [array.copy() for array in arrays]
    for target, array in zip(out, arrays, strict=True):
        check_target(target, array)
    for target, array in zip(out, copy_overlapping(arrays, out), strict=True):
        np.copyto(target, array)
    return list(out)
