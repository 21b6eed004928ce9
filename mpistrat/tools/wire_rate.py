"""The bidirectional bandwidth between two machines of a job: the limit of a collective between nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.text import format_count

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["WireRate", "find_wire"]

BLOCK_BYTES, WINDOW = 60 << 10, 64  # messages that MPI sends eagerly, without a rendezvous, and many of them in flight
BUDGET_SECONDS, STREAMS = 0.3, 5
MIN_BLOCKS, MAX_BLOCKS = 64, 100_000


@dataclass(frozen=True)
class WireRate:
    """The measured bandwidth between two machines of a job.

    Attributes
    ----------
    machines : int
        Number of machines of the job.
    between : tuple of str
        The two machines that were measured.
    pairs : int
        Ranks of each machine that sent and received at the same time.
    bytes_per_second : float
        Bytes that each of the two sent per second while it received as many.
    """

    machines: int
    between: tuple[str, str]
    pairs: int
    bytes_per_second: float

    def __str__(self) -> str:
        one, other = self.between
        ranks = format_count(self.pairs, "rank")
        rate = f"{self.bytes_per_second * 8 / 1e6:.0f} Mbit/s"
        return f"{rate} each way between {one} and {other} with MPI messages, {ranks} of each at once"

    def all_reduce_seconds(self, nbytes: int) -> float:
        """Return the lower bound of an all-reduce: each machine sends 2 (n - 1) / n of the array, and receives as much."""
        return 2 * (self.machines - 1) / self.machines * nbytes / self.bytes_per_second


def find_wire(comm: MPI.Intracomm) -> WireRate | None:
    """Measure the bandwidth between rank 0's machine and another one; None if there is no other. A collective call.

    The best of several runs counts, because other load on the machines only lowers the result.
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
    """Return how long it takes to send `blocks` blocks to the partner, and to receive as many at the same time."""
    from mpi4py import MPI

    sent, received = np.ones(BLOCK_BYTES, np.uint8), np.empty((WINDOW, BLOCK_BYTES), np.uint8)
    comm.Barrier()
    started = time.perf_counter()
    # keep WINDOW blocks in flight, so that the link is never idle
    under_way = [(comm.Irecv(received[slot], partner), comm.Isend(sent, partner)) for slot in range(WINDOW)]
    for block in range(WINDOW, blocks + WINDOW):
        slot = block % WINDOW
        MPI.Request.Waitall(list(under_way[slot]))
        if block < blocks:
            under_way[slot] = comm.Irecv(received[slot], partner), comm.Isend(sent, partner)
    return time.perf_counter() - started
