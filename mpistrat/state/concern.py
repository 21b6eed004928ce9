"""Whom it concerns when a variable is used here, and what they must agree on."""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn

from mpistrat.arrays import Array
from mpistrat.context.stack import default_mode, get_update_replica_id, in_replica_context_of
from mpistrat.state.aggregation import VariableSynchronization, check_equal
from mpistrat.state.declared import Declared

__all__ = ["Concerned", "Where"]


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

    def _agree(self, method: str, where: Where, arrays: tuple[Array, ...]) -> None:
        """In strict mode, check that all whom a call concerns make it, and outside ``run`` with equal arrays."""
        collectives = self._strategy.extended.collectives
        if not collectives.is_strict or not self._concerns_others(where):
            return
        collectives.agree(f"{self!r}.{method}")
        if arrays and where is Where.OUTSIDE and self._root is None:
            check_equal(f"{self!r}.{method}", arrays, collectives)

    def _refuse(self, method: str, error: Exception, where: Where) -> NoReturn:
        """Raise; in strict mode all whom the call concerns are told."""
        if self._concerns_others(where):
            self._strategy.extended.collectives.refuse(f"{self!r}.{method}", error)
        raise error

    def _concerns_others(self, where: Where) -> bool:
        return where is Where.OUTSIDE or (where is Where.IN_RUN and not self._is_on_read)
