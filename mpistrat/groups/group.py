"""Group: a communicator that we own, with its name and the world ranks in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Group", "ranks_text"]


class Group:
    """Some ranks of the world and the communicator that joins them.

    Parameters
    ----------
    comm : MPI.Intracomm
        A communicator made for this group; the group owns it and frees it.
    name : str
        What errors call it: ``world``, ``intra node0``, ``rail 1``.
    ranks : tuple of int
        The world ranks, in the order of their rank in `comm`.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, ranks: tuple[int, ...]) -> None:
        assert comm.Get_size() == len(ranks), f"group {name} has {comm.Get_size()} members, {len(ranks)} ranks were named"
        self.comm = comm
        self.name = name
        self.ranks = ranks
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    def close(self) -> None:
        """Free the communicator. A collective call in this group; the group cannot be used afterwards."""
        self.comm.Free()

    def __repr__(self) -> str:
        return f"Group({self.name}, rank={self.rank}({self.size}))"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
