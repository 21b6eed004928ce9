"""HostMover: arrays of host memory are moved between ranks by MPI."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array, as_bytes, to_host
from mpistrat.groups.group import Group
from mpistrat.transports.mpi import MpiTransport
from mpistrat.transports.pairwise import Pairwise
from mpistrat.transports.steps import Steps


class HostMover:
    """Moves arrays between the ranks of a group through host memory, as bytes."""

    def __init__(self, group: Group) -> None:
        self._group, self._mpi = group, MpiTransport(group)

    def fetch(self, array: Array) -> Array:
        """Return an array where it can be moved: in host memory."""
        return to_host(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], out: Array | None = None) -> Array:
        """Return memory for a result: `out` where that is host memory."""
        return out if type(out) is np.ndarray else np.empty(shape, dtype)

    def all_gather(self, whole: Array, bounds: Sequence[int]) -> Steps:
        """Return the steps that give every rank bytes ``bounds[r]:bounds[r + 1]`` of each rank r."""
        return self._mpi.all_gather(as_bytes(whole), bounds).run()

    def broadcast(self, array: Array, root: int) -> Steps:
        """Return the steps that give every rank the array of `root`."""
        return self._mpi.broadcast(as_bytes(array), root).run()

    def exchange(self, sends: Sequence[Array], receives: Sequence[Array]) -> Steps:
        """Return the steps that send an array to each peer, and receive one from each; empty ones are not sent."""
        return Pairwise(self._group, sends, receives).run()
