"""How large a chunk is: the limits in one table, and the even split of a buffer.

File law: every size limit of the planners stands here; tuning an algorithm is changing a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpistrat.topology.world import World

__all__ = ["SCRATCH_BYTES", "PipelineRule", "chunk_elements", "padded", "pipeline_rule"]

KIB, MIB = 2**10, 2**20

SCRATCH_BYTES = 64 * MIB
"""The largest chunk where nothing asks for a smaller one: bounds the scratch memory of a rank."""


@dataclass(frozen=True)
class PipelineRule:
    """How the pipelined algorithm cuts a buffer where the caller does not say.

    Attributes
    ----------
    num_chunks : int
        Chunks to aim for.
    min_bytes, max_bytes : int
        Bounds of a chunk, stronger than `num_chunks`.
    depth : int
        Chunks under way at a time.
    """

    num_chunks: int
    min_bytes: int
    max_bytes: int
    depth: int

    def chunk_bytes(self, num_bytes: int) -> int:
        """Return the largest chunk for a buffer of `num_bytes`."""
        return min(max(num_bytes // self.num_chunks, self.min_bytes), self.max_bytes)


# one node has nothing to overlap: its chunks only keep the shared window inside the cache
_ONE_NODE = PipelineRule(num_chunks=4, min_bytes=1 * MIB, max_bytes=1 * MIB, depth=3)
_SEVERAL_NODES = PipelineRule(num_chunks=4, min_bytes=512 * KIB, max_bytes=4 * MIB, depth=3)


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
    shards = world.num_shards
    largest = max(max_bytes // itemsize // shards, 1) * shards
    num_chunks = max(_ceil_div(count, largest), 1)
    return max(padded(world, _ceil_div(count, num_chunks)), shards)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
