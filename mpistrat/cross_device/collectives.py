"""Collectives: one call for many arrays, over all replicas; and those of a single replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.lib.array_utils import byte_bounds

from mpistrat.algorithms.choose import Choice
from mpistrat.arrays import Array
from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.timeline import Timeline
from mpistrat.topology.world import World

__all__ = ["Collectives", "LocalCollectives", "apart", "check_gather", "check_out", "is_fit"]


class Collectives(ABC):
    """What a strategy communicates through.

    Attributes
    ----------
    world : World
        Which replica sits where.
    rank, size : int
        This replica, and the number of replicas.
    timeline : Timeline
        Records the phases of each collective while it is enabled.
    is_strict : bool
        Whether replicas compare their calls before each collective.
    """

    world: World
    rank: int
    size: int
    timeline: Timeline
    is_strict: bool = False

    @abstractmethod
    def all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Combine each array across replicas. A collective call.

        Parameters
        ----------
        op : ReduceOp
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

    @abstractmethod
    def all_gather(self, array: Array, axis: int = 0) -> Array:
        """Concatenate the arrays of all replicas along `axis`, in replica order. A collective call.

        Extents along `axis` may differ; all others, and the dtype, must agree.

        Raises
        ------
        InvalidArgumentError
            If the array has no axes, `axis` is out of range, or shapes or dtypes do not fit: on every replica.
        """

    @abstractmethod
    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Return the array of replica `root`, whose shape and dtype count. A collective call."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all replicas have come here. A collective call."""

    @abstractmethod
    def agree(self, call: str, error: Exception | None = None) -> None:
        """Check, strict mode or not, that all replicas pass the same text. A collective call.

        Raises
        ------
        AgreementError
            On every replica, if they do not; on one that passes an `error`, that error.
        """

    def refuse(self, call: str, error: Exception) -> NoReturn:
        """Raise `error`, of a replica that cannot make the call; in strict mode the others, which make it, are told."""
        if self.is_strict:
            self.agree(call, error)
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

    def close(self) -> None:  # noqa: B027 - a single replica holds nothing
        """Free what the operations hold. A collective call."""


class LocalCollectives(Collectives):
    """The operations of a single replica: nothing is sent and MPI is not started."""

    def __init__(self) -> None:
        self.world = World.from_shape("1x1")
        self.rank, self.size = 0, 1
        self.timeline = Timeline()

    def all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Copy: the combination of one component is the component."""
        for array in arrays:
            check_dtype(op, array.dtype)
        if out is None:
            return [array.copy() for array in arrays]
        check_out(out, arrays)
        for target, array in zip(out, arrays, strict=True):
            np.copyto(target, array)
        return list(out)

    def all_gather(self, array: Array, axis: int = 0) -> Array:
        """Return a copy, after the checks that several replicas would make."""
        check_gather(array, axis)
        return np.array(array)

    def broadcast(self, array: Array, root: int = 0) -> Array:
        """Return a copy."""
        return np.array(array)

    def barrier(self) -> None:
        """Return at once."""

    def agree(self, call: str, error: Exception | None = None) -> None:
        """Agree with nobody else."""
        if error is not None:
            raise error

    def choose(self, count: int, dtype: np.dtype[np.generic], options: CommunicationOptions | None = None) -> Choice | None:
        """Return None."""
        return None


def check_gather(array: Array, axis: int) -> int:
    """Return `axis` as a non-negative number.

    Raises
    ------
    InvalidArgumentError
        If the array has no axes, or `axis` is none of them.
    """
    if array.ndim == 0:
        raise InvalidArgumentError("all_gather needs arrays with at least one axis; got a scalar: pass x.reshape(1)")
    if not -array.ndim <= axis < array.ndim:
        accepted = f"-{array.ndim} to {array.ndim - 1} are accepted"
        raise InvalidArgumentError(f"axis {axis} is out of range for an array of shape {array.shape}: {accepted}")
    return axis % array.ndim


def check_out(out: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
    """Return `out` as a list, after checking that results for `arrays` can be written to it.

    Raises
    ------
    InvalidArgumentError
        If there are more or fewer of them, or one has another shape or dtype, or is not C-contiguous and writable.
    """
    if len(out) != len(arrays):
        raise InvalidArgumentError(f"out must hold one array for each of the {len(arrays)} that are reduced; got {len(out)}")
    for target, array in zip(out, arrays, strict=True):
        contiguous, writable = target.flags.c_contiguous, target.flags.writeable
        if target.shape != array.shape or target.dtype != array.dtype or not contiguous or not writable:
            raise InvalidArgumentError(
                f"out must be a writable, C-contiguous {array.dtype} array of shape {array.shape}; "
                f"got {target.dtype} {target.shape}, contiguous={contiguous}, writable={writable}"
            )
    return list(out)


def apart(arrays: Sequence[Array], out: Sequence[Array]) -> list[Array]:
    """Return `arrays`, copied where one shares memory with the result of another: results are written before all are read."""
    spans = [(*byte_bounds(target), index) for index, target in enumerate(out) if target.size]
    spans += [(*byte_bounds(array), index) for index, array in enumerate(arrays) if array.size and array is not out[index]]
    # sorted by where they begin, memory overlaps only where a span begins before all earlier ones have ended
    reach, crossing = 0, False
    for first, end, _ in sorted(spans):
        crossing = crossing or first < reach
        reach = max(reach, end)
    if not crossing:
        return list(arrays)
    return [array if array is out[index] else array.copy() for index, array in enumerate(arrays)]


def is_fit(target: Array, source: Array) -> bool:
    """Return whether MPI can write to `target` what it makes of `source`; else the longer way says why not, or copies."""
    if target.shape != source.shape or target.dtype is not source.dtype or not target.flags.carray:
        return False
    # arrays that own their memory do not overlap, unless they are one
    owners = source.base is None and target.base is None and source is not target
    return owners or not np.may_share_memory(source, target)
