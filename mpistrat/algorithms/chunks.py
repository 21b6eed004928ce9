"""How large a chunk is: the limits in one table, and how a buffer is cut.

File law: every size limit of the planners stands here; tuning an algorithm is changing a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat.topology.world import World

__all__ = [
    "DEVICE_CHUNK_BYTES",
    "SCRATCH_BYTES",
    "PipelineRule",
    "chunk_elements",
    "chunk_lengths",
    "padded",
    "pipeline_rule",
    "whole_shards",
]

KIB, MIB = 2**10, 2**20

SCRATCH_BYTES = 64 * MIB
"""The largest chunk where nothing asks for a smaller one: bounds the scratch memory of a rank."""

DEVICE_CHUNK_BYTES = 16 * MIB
"""A chunk of a pipeline on devices, which have no cache to stay in but take longer to begin a chunk: not measured."""


@dataclass(frozen=True)
class PipelineRule:
    """How the pipelined algorithm cuts a buffer where the caller does not say.

    Attributes
    ----------
    end_bytes : int
        The first chunk and the last: while the one is copied in, and the other out, nothing is between the nodes.
    max_bytes : int
        The largest chunk.
    depth : int
        Chunks under way at a time.
    """

    end_bytes: int
    max_bytes: int
    depth: int


# one node has nothing to overlap: its chunks only keep the shared window inside the cache
_ONE_NODE = PipelineRule(end_bytes=1 * MIB, max_bytes=1 * MIB, depth=3)
_SEVERAL_NODES = PipelineRule(end_bytes=512 * KIB, max_bytes=2 * MIB, depth=3)


def pipeline_rule(world: World) -> PipelineRule:
    """Return how the pipelined algorithm cuts buffers on this world."""
    return _ONE_NODE if world.num_nodes == 1 else _SEVERAL_NODES


def padded(world: World, count: int) -> int:
    """Return `count` rounded up to a multiple of the number of shards."""
    return _ceil_div(count, world.num_shards) * world.num_shards


def chunk_elements(world: World, count: int, itemsize: int, max_bytes: int) -> int:
    """Return the elements of a chunk that cuts a buffer into as few, and as equal, chunks as possible.

    Parameters
    ----------
    world : World
        Its number of shards divides the answer.
    count : int
        Elements of the buffer.
    itemsize : int
        Bytes of one element.
    max_bytes : int
        Upper bound of a chunk, unless one element per shard is more.
    """
    return _even(world, count, whole_shards(world, itemsize, max_bytes))


def chunk_lengths(world: World, count: int, end: int, largest: int) -> list[int]:
    """Return the elements of chunks that double from `end` up to at most `largest`, and then shrink alike.

    Parameters
    ----------
    world : World
        Its number of shards divides `end` and `largest`, and the lengths of all chunks but one in the middle.
    count : int
        Elements of the buffer.
    end, largest : int
        Elements of the first and last chunk, and the upper bound of those between; if they are equal, all chunks are as
        equal as possible.
    """
    edge: list[int] = []
    size = min(end, largest)
    while size < largest and count >= 3 * size:
        edge.append(size)
        count -= 2 * size
        size = min(2 * size, largest)
    even = _even(world, count, size)
    return [*edge, *(min(even, count - start) for start in range(0, count, even)), *reversed(edge)]


def whole_shards(world: World, itemsize: int, num_bytes: int) -> int:
    """Return the elements of `num_bytes`, rounded down to equal shards of at least one element."""
    return max(num_bytes // itemsize // world.num_shards, 1) * world.num_shards


def _even(world: World, count: int, largest: int) -> int:
    """Return the elements of each of as few chunks as possible."""
    return padded(world, max(_ceil_div(count, max(_ceil_div(count, largest), 1)), 1))


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
