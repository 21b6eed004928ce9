"""Virtual replicas: a sum over the parts of a global batch, whose bits do not depend on how many ranks compute it.

1. The rows of a global batch are cut into V parts, as equal as can be; each rank has a run of them.
2. A rank calls the program's function for each of its parts.
3. The V results are added along one tree: those of each half of the parts, and then these two sums; within a half likewise.
4. A rank adds along the tree what it has; ranks exchange the sums of the subtrees that one rank has whole, and add the rest.
5. So V and the rows determine which numbers are added in which order; ranks only determine who adds them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_operand, flat, in_dtype, is_on_device, like, part_bounds
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.rebatch import num_rows, own_parts, share
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype, quiet
from mpistrat.structures import each_leaf, flatten, leaf_names

Subtree = tuple[int, int]
"""The parts that a subtree adds: the first one, and the one after the last."""


def sum_of_parts(
    communicator: BaseCommunicator, fn: Callable[[Any], Any], batch: Any, num_parts: int, options: CommunicationOptions | None
) -> Any:
    """Return what `ReplicaContext.sum_of_parts` returns. A collective call."""
    rank, size, call = communicator.rank, communicator.size, f"sum_of_parts(virtual_replicas={num_parts})"
    with communicator.refusing(call, options):
        check_options(options)
        parts = [own_parts(num_parts, each, size) for each in range(size)]
        rows = num_rows(batch)
    communicator.note(call, options)
    _check_rows(communicator.all_gather(np.array([rows]), 0, options).tolist(), parts)
    results = _Results()

    def own_sum(subtree: Subtree) -> list[Array] | None:
        if subtree[1] - subtree[0] > 1:
            return None
        with communicator.refusing(call, options):
            return results.packed(fn(share(batch, subtree[0] - parts[rank].start, len(parts[rank]))))

    every = 0, parts[-1].stop
    subtrees = [list(_subtrees_within(each, every)) for each in parts]
    sums = [_added(subtree, own_sum) for subtree in subtrees[rank]]
    communicator.note(f"{call} of {results}", options)
    known: dict[Subtree, list[Array]] = {subtree: [] for owned in subtrees for subtree in owned}
    for vectors in zip(*sums, strict=True):  # of each dtype; each rank adds a shard of the vectors
        shards = pairwise(part_bounds(vectors[0].size, size))
        sent = [np.concatenate([vector[start:stop] for vector in vectors]) for start, stop in shards]
        for owned, received in zip(subtrees, communicator.all_to_all(sent, options), strict=True):
            for subtree, shard in zip(owned, received.reshape(len(owned), -1), strict=True):
                known[subtree].append(shard)
    return results.unpacked(communicator.all_gather(_added(every, known.get), 0, options))


class _Results:
    """What the function returns for parts, all alike: vectors of it, one for each dtype in which is added, and back."""

    def __init__(self) -> None:
        self._text = ""

    def packed(self, value: Any) -> list[Array]:
        """Return new vectors of the numbers of a value."""
        leaves, structure = flatten(value)
        arrays: list[Array] = each_leaf(_addend, leaves, lambda: leaf_names(value, "the result"))
        text = f"{structure} with {', '.join(f'{array.dtype}{list(array.shape)}' for array in arrays)}"
        if self._text not in ("", text):
            raise InvalidArgumentError(f"the function must return alike arrays for all parts; got {self._text}, then {text}")
        self._text, self._leaves, self._structure, self._arrays = text, leaves, structure, arrays
        self._groups = dict[tuple[np.dtype[Any], bool], list[int]]()
        for index, array in enumerate(arrays):
            kind = accumulation_dtype(ReduceOp.SUM, array.dtype), is_on_device(array)
            self._groups.setdefault(kind, []).append(index)
        return [
            np.concatenate([in_dtype(flat(arrays[index]), dtype) for index in group])
            for (dtype, _), group in self._groups.items()
        ]

    def unpacked(self, vectors: list[Array]) -> Any:
        """Return vectors as a value."""
        found: list[Any] = [None] * len(self._leaves)
        for vector, group in zip(vectors, self._groups.values(), strict=True):
            start = 0
            for index in group:
                array = self._arrays[index]
                part = vector[start : start + array.size].reshape(array.shape)
                found[index], start = like(in_dtype(part, array.dtype), self._leaves[index]), start + array.size
        return self._structure.unflatten(found)

    def __str__(self) -> str:
        return self._text


def _addend(leaf: Any, name: str = "the result") -> Array:
    array = as_operand(leaf, name)
    check_dtype(ReduceOp.SUM, array.dtype, name)
    return array


def _added(subtree: Subtree, known: Callable[[Subtree], list[Array] | None]) -> list[Array]:
    """Return the vectors of a subtree: the known ones, which may be changed, or else the sums of those of its halves."""
    found = known(subtree)
    if found is None:
        first, second = _halves(subtree)
        one, other, add = _added(first, known), _added(second, known), quiet()
        found = [add(operator.iadd, total, addend) for total, addend in zip(one, other, strict=True)]
    return found


def _subtrees_within(parts: range, subtree: Subtree) -> Iterator[Subtree]:
    """Yield the largest subtrees that add these parts, and no others."""
    start, stop = subtree
    if parts.start <= start and stop <= parts.stop:
        yield subtree
    elif start < parts.stop and parts.start < stop:
        for half in _halves(subtree):
            yield from _subtrees_within(parts, half)


def _halves(subtree: Subtree) -> tuple[Subtree, Subtree]:
    middle = sum(subtree) // 2
    return (subtree[0], middle), (middle, subtree[1])


def _check_rows(found: list[int], parts: list[range]) -> None:
    """Check that each rank has the rows of its parts."""
    bounds = part_bounds(sum(found), parts[-1].stop)
    wanted = [bounds[each.stop] - bounds[each.start] for each in parts]
    if found != wanted:
        error = InvalidArgumentError(
            f"the ranks have {', '.join(map(str, found))} rows of a batch, and those of whole parts are "
            f"{', '.join(map(str, wanted))}: {sum(found)} rows in {parts[-1].stop} parts.\n"
            "    incorrect:  strategy.experimental_distribute_dataset(dataset)\n"
            f"    correct:    strategy.experimental_distribute_dataset(dataset, "
            f"mpistrat.InputOptions(virtual_replicas={parts[-1].stop}))"
        )
        error.raised_everywhere = True
        raise error
