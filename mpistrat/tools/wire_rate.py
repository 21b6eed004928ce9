"""What two machines of a job can move between each other, both ways at once: the limit of a collective between nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.text import format_count

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["WireRate", "find_wire"]

BLOCK_BYTES, WINDOW = 60 << 10, 64  # blocks that MPI sends at once, without asking the receiver, and many of them
BUDGET_SECONDS, STREAMS = 0.3, 5
MIN_BLOCKS, MAX_BLOCKS = 64, 100_000


@dataclass(frozen=True)
class WireRate:
    """The links of a job's machines, as far as two of them tell.

    Attributes
    ----------
    machines : int
        How many the job has.
    between : tuple of str
        The two that were measured.
    pairs : int
        Ranks of each that sent and received at the same time.
    bytes_per_second : float
        What each of the two sent while it received as much.
    """

    machines: int
    between: tuple[str, str]
    pairs: int
    bytes_per_second: float

    def __str__(self) -> str:
        one, other = self.between
        ranks = format_count(self.pairs, "rank")
        rate = f"{self.bytes_per_second * 8 / 1e6:.0f} Mbit/s"
        return f"{rate} each way between {one} and {other}, {ranks} of each at once, as MPI moves it"

    def all_reduce_seconds(self, nbytes: int) -> float:
        """Return the least time of an all-reduce: each machine sends 2 (n - 1) / n of the array, and receives as much."""
        return 2 * (self.machines - 1) / self.machines * nbytes / self.bytes_per_second


def find_wire(comm: MPI.Intracomm) -> WireRate | None:
    """Measure the links between rank 0's machine and another one; None where there is no other. A collective call.

    The best of several streams counts: it is the links that are asked for, not what else the machines do.
    """
    from mpi4py import MPI

    names = comm.allgather(MPI.Get_processor_name())
    machines = list(dict.fromkeys(names))
    if len(machines) == 1:
        return None
    one, other = machines[:2]
    pairs = list(zip(*([rank for rank, name in enumerate(names) if name == machine] for machine in (one, other)), strict=False))
    partners = {rank: partner for pair in pairs for rank, partner in (pair, pair[::-1])}
    partner = partners.get(comm.Get_rank(), MPI.PROC_NULL)
    _stream(comm, partner, MIN_BLOCKS)  # connections are made
    affordable: float = comm.allreduce(_stream(comm, partner, MIN_BLOCKS) / MIN_BLOCKS, MPI.MAX)
    blocks = int(min(max(BUDGET_SECONDS / affordable, MIN_BLOCKS), MAX_BLOCKS))
    seconds = min(comm.allreduce(_stream(comm, partner, blocks), MPI.MAX) for _ in range(STREAMS))
    return WireRate(len(machines), (one, other), len(pairs), len(pairs) * blocks * BLOCK_BYTES / seconds)


def _stream(comm: MPI.Intracomm, partner: int, blocks: int) -> float:
    """Return how long so many blocks take to the partner, and from it at the same time."""
    from mpi4py import MPI

    sent, received = np.ones(BLOCK_BYTES, np.uint8), np.empty((WINDOW, BLOCK_BYTES), np.uint8)
    comm.Barrier()
    started = time.perf_counter()
    # so many are under way at any time: a block that waits for its answer must not leave the link idle
    under_way = [(comm.Irecv(received[slot], partner), comm.Isend(sent, partner)) for slot in range(WINDOW)]
    for block in range(WINDOW, blocks + WINDOW):
        slot = block % WINDOW
        MPI.Request.Waitall(list(under_way[slot]))
        if block < blocks:
            under_way[slot] = comm.Irecv(received[slot], partner), comm.Isend(sent, partner)
    return time.perf_counter() - started
