"""Whom it concerns when a variable is used here, and what they must agree on."""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn

from mpistrat.arrays import Array
from mpistrat.context.stack import default_mode, get_update_replica_id, in_replica_context_of
from mpistrat.context.values import PerReplica
from mpistrat.state import refusals
from mpistrat.state.aggregation import VariableAggregation, VariableSynchronization, check_equal, checksum
from mpistrat.state.declared import Declared

__all__ = ["Concerned", "Where"]

_COMPARED_BYTES = 1 << 20  # what all replicas assign is compared up to here


class Where(Enum):
    """Whom what is done to a variable concerns: this rank alone, the replicas in ``run``, or all ranks outside it."""

    HERE = 0
    IN_RUN = 1
    OUTSIDE = 2


class Concerned(Declared):
    """A variable that knows where it is used."""

    def _where(self, call: str) -> Where:
        inside = in_replica_context_of(self._strategy, call)
        if self._strategy is default_mode().strategy or get_update_replica_id() is not None:
            return Where.HERE
        return Where.IN_RUN if inside else Where.OUTSIDE

    @property
    def _root(self) -> int | None:
        """The rank that keeps the array, under central storage."""
        extended: Any = self._strategy.extended
        return extended.root if getattr(extended, "is_central", False) else None

    @property
    def _is_on_read(self) -> bool:
        return self._synchronization is VariableSynchronization.ON_READ and self._root is None

    def _is_combined_here(self) -> bool:
        """Return whether reading the variable combines the arrays of all ranks."""
        if self._strategy is default_mode().strategy:
            return False
        return self._where("reading a variable") is Where.OUTSIDE and self._is_on_read

    def _own(self, method: str, value: Any, where: Where) -> Any:
        """Return a value that is assigned here; inside ``strategy.run`` this replica's component of one with several."""
        if not isinstance(value, PerReplica):
            return value
        if where is not Where.IN_RUN:
            raise refusals.varies(self, method)
        return value.in_replica()

    @property
    def _needs_aggregation(self) -> bool:
        """Whether replicas cannot assign: under central storage, without an aggregation."""
        return self._root is not None and self._aggregation is VariableAggregation.NONE

    def _agree(self, method: str, where: Where, arrays: tuple[Array, ...]) -> None:
        """Have it checked that all whom a call concerns make it, and outside ``run`` with equal arrays."""
        if not self._concerns_others(where):
            return
        communicator = self._strategy.extended.communicator
        communicator.note(f"{self!r}.{method}")
        if not arrays or where is not Where.OUTSIDE or self._root is not None:
            return
        if communicator.is_strict:
            check_equal(f"{self!r}.{method}", arrays, communicator)
        elif sum(array.nbytes for array in arrays) <= _COMPARED_BYTES:
            communicator.note(f"with arrays of checksum {checksum(arrays):x}")

    def _refuse(self, method: str, error: Exception, where: Where) -> NoReturn:
        """Raise; all whom the call concerns are told."""
        if self._concerns_others(where):
            self._strategy.extended.communicator.refuse(f"{self!r}.{method}", error)
        raise error

    def _concerns_others(self, where: Where) -> bool:
        return where is Where.OUTSIDE or (where is Where.IN_RUN and not self._is_on_read)
