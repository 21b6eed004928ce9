"""Agreement: check that every rank is making the same call, before the call can hang."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from mpistrat.errors import AgreementError
from mpistrat.groups.group import Group

__all__ = ["Agreement"]


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

    def check(self, call: str, error: Exception | None = None) -> None:
        """Check that all ranks pass the same text. A collective call.

        Parameters
        ----------
        call : str
            Describes the call: verb, op, dtypes and shapes.
        error : Exception, optional
            Why this rank cannot make the call; it is raised here, and the other ranks are told.

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
        self._group.comm.Allreduce(self._mine, self._least, MPI.MIN)
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
        lines = [f"  {_ranks(ranks)}: {text}" for text, ranks in variants.items()]
        raise AgreementError(
            f"ranks made different calls (collective {self._sequence} of group {self._group.name}):\n"
            + "\n".join(lines)
            + "\nEvery rank must make the same collective calls in the same order, with the same operation, structure, "
            "dtypes and shapes."
        )


def _ranks(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
