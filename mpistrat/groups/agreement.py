"""Agreement: check that every rank is making the same call, before the call can hang."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.errors import AgreementError
from mpistrat.groups.group import Group, ranks_text

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Agreement"]

Enter = Callable[[], "MPI.Request"]


def _wait(enter: Enter) -> None:
    enter().Wait()


class Agreement:
    """Compares calls across the ranks of a group.

    One all-reduce of 16 bytes where all agree; texts are exchanged only where they do not.

    Parameters
    ----------
    group : Group
        The ranks that must agree.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sequence = 0
        self._digests: dict[str, int] = {}
        self._mine = np.empty(2, np.int64)
        self._least = np.empty(2, np.int64)

    def check(self, call: str, error: Exception | None = None, meet: Callable[[Enter], None] = _wait) -> None:
        """Check that all ranks pass the same text. A collective call.

        Parameters
        ----------
        call : str
            Describes the call: verb, op, dtypes and shapes.
        error : Exception, optional
            Why this rank cannot make the call; it is raised here, and the other ranks are told.
        meet : callable
            Starts the all-reduce that it is given, and returns when that has ended; by default it waits without a deadline.

        Raises
        ------
        AgreementError
            On every rank where the texts differ, naming who passed what.
        """
        from mpi4py import MPI

        self._sequence += 1
        digest = self._digest(call if error is None else f"{call} {error!r}")
        # one MIN of (h, -h) gives the least and the greatest digest
        self._mine[0], self._mine[1] = digest, -digest
        meet(lambda: self._group.comm.Iallreduce(self._mine, self._least, MPI.MIN))
        if self._least[0] != digest or self._least[1] != -digest:
            self._tell(call, error)
        if error is not None:
            raise error

    def _digest(self, text: str) -> int:
        digest = self._digests.get(text)
        if digest is None:
            digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 2
            self._digests[text] = digest
        return digest

    def _tell(self, call: str, error: Exception | None) -> None:
        """Exchange what every rank did, and raise on all."""
        mine = call if error is None else f"{call}, which failed: {type(error).__name__}: {error}"
        texts: list[str] = self._group.comm.allgather(mine)
        if error is not None:
            raise error
        variants: dict[str, list[int]] = {}
        for rank, text in zip(self._group.ranks, texts, strict=True):
            variants.setdefault(text, []).append(rank)
        lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in variants.items()]
        raise AgreementError(
            f"ranks made different calls (collective {self._sequence} of group {self._group.name}):\n"
            + "\n".join(lines)
            + "\nEvery rank must make the same collective calls in the same order, with the same operation, structure, "
            "dtypes and shapes."
        )
