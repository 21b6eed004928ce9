"""TensorFlow's ``tf.distribute.experimental.partitioners``: into how many shards a variable on servers is split."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.errors import InvalidArgumentError

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner(ABC):
    """Decides into how many shards a variable is split: an argument of `ParameterServerStrategy`.

    Those below raise InvalidArgumentError if an argument is less than 1.
    """

    @abstractmethod
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of shards along each axis: 1 along all but `axis`.

        Parameters
        ----------
        shape : sequence of int
            The shape of the variable.
        dtype : dtype
            The type of its elements.
        axis : int
            Where to split it. Variables are split along axis 0.
        """


class FixedShardsPartitioner(Partitioner):
    """Splits into a fixed number of shards, or into as many as there are rows where these are fewer.

    Parameters
    ----------
    num_shards : int
        The number of shards.
    """

    def __init__(self, num_shards: int) -> None:
        _check_positive(num_shards=num_shards)
        self._num_shards = num_shards

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        return _along(axis, shape, self._num_shards)


class MinSizePartitioner(Partitioner):
    """Splits into as many shards as keep each at least so large, and not more than a maximum number.

    Parameters
    ----------
    min_shard_bytes : int
        The least number of bytes of a shard.
    max_shards : int
        The greatest number of shards.
    bytes_per_string : int
        Without effect, since no variable has strings; accepted because programs for TensorFlow pass it.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16) -> None:
        _check_positive(min_shard_bytes=min_shard_bytes, max_shards=max_shards, bytes_per_string=bytes_per_string)
        self._min_shard_bytes, self._max_shards = min_shard_bytes, max_shards

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        shards = math.prod(shape) * np.dtype(dtype).itemsize // self._min_shard_bytes
        return _along(axis, shape, min(self._max_shards, shards))


class MaxSizePartitioner(Partitioner):
    """Splits into as few shards as keep each at most so large, and not more than a maximum number.

    Parameters
    ----------
    max_shard_bytes : int
        The greatest number of bytes of a shard. A row is never split, however large.
    max_shards : int, optional
        The greatest number of shards, which counts more than `max_shard_bytes`.
    bytes_per_string : int
        Without effect, since no variable has strings; accepted because programs for TensorFlow pass it.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16) -> None:
        most = 1 if max_shards is None else max_shards
        _check_positive(max_shard_bytes=max_shard_bytes, max_shards=most, bytes_per_string=bytes_per_string)
        self._max_shard_bytes, self._max_shards = max_shard_bytes, max_shards

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        rows = shape[axis]
        row_bytes = math.prod(shape) * np.dtype(dtype).itemsize / max(1, rows)
        rows_per_shard = max(1, math.floor(self._max_shard_bytes / row_bytes)) if row_bytes else max(1, rows)
        shards = math.ceil(rows / rows_per_shard)
        return _along(axis, shape, shards if self._max_shards is None else min(self._max_shards, shards))


def _along(axis: int, shape: Sequence[int], shards: int) -> list[int]:
    counts = [1] * len(shape)
    counts[axis] = max(1, min(shards, shape[axis]))
    return counts


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise InvalidArgumentError(f"{name} must be at least 1; got {value!r}")
