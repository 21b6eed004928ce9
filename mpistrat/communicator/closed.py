"""ClosedCommunicator: what a strategy that was closed communicates through, which is to say that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicator.base import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import ReduceOp

__all__ = ["ClosedCommunicator"]


class ClosedCommunicator(Communicator):
    """Knows the replica that there was; every collective raises RuntimeError.

    Parameters
    ----------
    owner : str
        What was closed, for the message.
    ops : Communicator
        The operations it had.
    """

    def __init__(self, owner: str, ops: Communicator) -> None:
        self._owner = owner
        self.world, self.rank, self.size, self.timeline = ops.world, ops.rank, ops.size, ops.timeline

    def all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
    ) -> NoReturn:
        """Raise."""
        self._stop()

    def start_all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        structure: object = None,
    ) -> NoReturn:
        """Raise."""
        self._stop()

    def reduce_scatter(
        self, op: ReduceOp | str, array: Array, axis: int = 0, options: CommunicationOptions | None = None
    ) -> NoReturn:
        """Raise."""
        self._stop()

    def all_gather(self, array: Array, axis: int = 0, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise."""
        self._stop()

    def gather(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise."""
        self._stop()

    def all_to_all(self, arrays: Sequence[Array], options: CommunicationOptions | None = None) -> NoReturn:
        """Raise."""
        self._stop()

    def broadcast(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise."""
        self._stop()

    def barrier(self, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise."""
        self._stop()

    def agree(self, call: str, error: Exception | None = None, options: CommunicationOptions | None = None) -> NoReturn:
        """Raise."""
        self._stop()

    def choose(self, count: int, dtype: np.dtype[np.generic], options: CommunicationOptions | None = None) -> NoReturn:
        """Raise."""
        self._stop()

    def explain_batch(self, arrays: Sequence[Array], options: CommunicationOptions | None = None) -> NoReturn:
        """Raise."""
        self._stop()

    def memory_report(self) -> NoReturn:
        """Raise."""
        self._stop()

    def _stop(self) -> NoReturn:
        raise RuntimeError(
            f"this strategy was closed: {self._owner} cannot communicate any more.\n"
            "    incorrect:  strategy.close(); strategy.run(step)\n"
            "    correct:    strategy.run(step); strategy.close(), once, after the last step"
        )
