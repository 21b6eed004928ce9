"""Which rows of a global batch each replica gets: the ceiling split.

Rows keep their order. Every replica but the last ones has the same number; the last may have fewer, or none:

==============  ========  ==================================
rows            replicas  handed out
==============  ========  ==================================
0 1 2 3         2         0 1 | 2 3
0 1 2 3         3         0 1 | 2 3 | nothing
0 1 2 3         5         0 | 1 | 2 | 3 | nothing
==============  ========  ==================================
"""

from __future__ import annotations

__all__ = ["shard_bounds"]


def shard_bounds(num_rows: int, replica: int, num_replicas: int) -> tuple[int, int]:
    """Return the first row of a replica's share of a batch, and the row after its last."""
    share = -(-num_rows // num_replicas)
    return min(replica * share, num_rows), min((replica + 1) * share, num_rows)
