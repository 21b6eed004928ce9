"""VariableCall: a call of a variable's method, which the ranks that take part compare before the array is changed."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from mpistrat.arrays import Array
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.errors import AgreementError
from mpistrat.state import refusals
from mpistrat.state.aggregation import check_equal, checksum
from mpistrat.state.declaration import Declaration, UpdateScope

__all__ = ["VariableCall"]

_COMPARED_BYTES = 1 << 20  # larger assigned values are not compared


class VariableCall(NamedTuple):
    """One call of a method of a variable.

    Attributes
    ----------
    variable : Mirrored
        The variable.
    declaration : Declaration
        Its parameters.
    method : str
        Name of the method.
    scope : UpdateScope
        The ranks that take part.
    """

    variable: Mirrored
    declaration: Declaration
    method: str
    scope: UpdateScope

    def __str__(self) -> str:
        return f"{self.variable!r}.{self.method}"

    def component(self, value: Any) -> Any:
        """Return an argument; inside ``strategy.run`` this replica's component of a per-replica value.

        Raises
        ------
        TypeError
            If it is a per-replica value elsewhere.
        """
        if not isinstance(value, PerReplica):
            return value
        if self.scope is not UpdateScope.IN_RUN:
            raise refusals.varies(self.variable, self.method)
        return value.in_replica()

    def compare(self, *arrays: Array) -> None:
        """Compare the call on all ranks that take part, with the next collective; outside ``run`` also the arrays.

        With MPISTRAT_STRICT the arrays are compared at once, which is a collective call.
        """
        if not self._concerns_others:
            return
        communicator = self.declaration.communicator
        communicator.note(str(self))
        if not arrays or self.scope is not UpdateScope.OUTSIDE or self.declaration.root is not None:
            return
        if communicator.is_strict:
            check_equal(str(self), arrays, communicator)
        elif sum(array.nbytes for array in arrays) <= _COMPARED_BYTES:
            communicator.note(f"with arrays of checksum {checksum(arrays):x}")

    def require_equal(self, *arrays: Array) -> None:
        """Check that all replicas pass the same arrays, because there is no aggregation. A collective call.

        Raises
        ------
        AgreementError
            On every replica, if they do not.
        """
        communicator = self.declaration.communicator
        if communicator.size == 1:
            return
        try:
            check_equal(str(self), arrays, communicator)
        except AgreementError as error:
            raise refusals.differing(self.variable, self.method, communicator.size, error) from None

    def refuse(self, error: Exception) -> NoReturn:
        """Raise an error, on the other ranks that take part too."""
        if self._concerns_others:
            self.declaration.communicator.refuse(str(self), error)
        raise error

    @property
    def _concerns_others(self) -> bool:
        if self.scope is UpdateScope.IN_RUN:
            return not self.declaration.is_on_read
        return self.scope is UpdateScope.OUTSIDE
