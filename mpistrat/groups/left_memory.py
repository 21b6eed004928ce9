"""Memory of collectives that were given up: late peers may still read and write it, so it is never freed."""

from __future__ import annotations

__all__ = ["leave_to_peers"]

_left: list[object] = []


def leave_to_peers(memory: object) -> None:
    """Keep memory of a failed collective alive for ever; an MPI request that has not completed keeps its buffers."""
    _left.append(memory)
