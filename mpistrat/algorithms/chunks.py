"""Chunk sizes: the limits of all planners, and how a buffer is cut into chunks.

Invariant: every size limit of the planners is here; to tune an algorithm, change a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat.topology.world import World

KIB, MIB = 2**10, 2**20

SCRATCH_BYTES = 64 * MIB
"""The largest chunk of a plan without overlapping chunks: it bounds the scratch memory of a rank."""

COPIED_IN_CHUNKS_BYTES = 8 * MIB
"""Where each node has one rank, such arrays may be copied in chunks, while others are between nodes: at 10 Gbit/s between two
hosts 64 MiB take 75 ms, and 90 in one piece."""

DEVICE_CHUNK_BYTES = 16 * MIB
"""The chunk of a hierarchical plan on GPUs: larger than on CPUs, because each chunk costs kernel launches. Not measured."""

SCATTER_FROM_BYTES = 512 * KIB
"""The smallest array that is reduced and scattered: below, an all-reduce takes fewer steps, and each rank its part of that."""


@dataclass(frozen=True)
class PipelineRule:
    """The sizes of overlapping chunks, unless the caller sets one, and how many are in flight at a time."""

    end_bytes: int  # of the first and last: small, because links are idle while the first is copied in, and the last one out
    max_bytes: int
    depth: int


# on one node there is nothing to overlap: the chunks only keep the shared window inside the cache
_ONE_NODE = PipelineRule(end_bytes=1 * MIB, max_bytes=1 * MIB, depth=3)
_SEVERAL_NODES = PipelineRule(end_bytes=512 * KIB, max_bytes=2 * MIB, depth=3)


def pipeline_rule(world: World) -> PipelineRule:
    """Return the sizes of overlapping chunks on this world."""
    return _ONE_NODE if world.num_nodes == 1 else _SEVERAL_NODES


def padded(world: World, count: int) -> int:
    """Return `count` rounded up to a multiple of the number of shards."""
    return _ceil_div(count, world.num_shards) * world.num_shards


def chunk_elements(world: World, count: int, itemsize: int, max_bytes: int) -> int:
    """Return the elements of a chunk, so that the buffer has as few chunks as possible, of about equal length.

    They are a multiple of the number of shards, and have at most `max_bytes`, unless one element per shard is more.
    """
    return _even(world, count, whole_shards(world, itemsize, max_bytes))


def chunk_lengths(world: World, count: int, end: int, largest: int) -> list[int]:
    """Return the elements of each chunk: they double from `end` up to `largest`, and halve again towards the last chunk.

    `end`, `largest` and the lengths of all chunks but one in the middle are multiples of the number of shards. If both are
    equal, all chunks have about the same length.
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
    """Return the elements of a chunk, for as few chunks as possible."""
    return padded(world, max(_ceil_div(count, max(_ceil_div(count, largest), 1)), 1))


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
