"""Rows and single entries: the methods of a variable that read some of them, and those that change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array, as_array, in_dtype, like
from mpistrat.state.concern import Concerned, Where
from mpistrat.state.indices import checked_places, flattened

if TYPE_CHECKING:
    from mpistrat.communicator.sparse import IndexedSlices
    from mpistrat.state.variables import Variable

__all__ = ["ScatterUpdates"]


class ScatterUpdates(Concerned):
    """A variable of which some rows or entries can be read, and changed; it says itself how changes are applied."""

    def sparse_read(self, indices: Any, name: str | None = None) -> Array:
        """Return some of the rows, as a new array; communicates and raises like `read`.

        Parameters
        ----------
        indices : array_like of int
            Which rows, counted along the first axis, in any shape; the result has this shape and then that of a row.
        name : str, optional
            Without effect; accepted because programs for TensorFlow pass it.

        Raises
        ------
        InvalidArgumentError
            If an index is negative or out of range, or the variable has no axis.
        UnsupportedDtypeError
            If the indices are no integers.
        """
        return self._taken("sparse_read", lambda: as_array(indices, "indices")[..., np.newaxis])

    def gather_nd(self, indices: Any, name: str | None = None) -> Array:
        """Return single entries, as a new array; communicates and raises like `sparse_read`.

        Parameters
        ----------
        indices : array_like of int
            Its last axis holds the indices of one entry along the first axes of the variable: of all of them for a number, of
            fewer for an array.
        name : str, optional
            Without effect; accepted because programs for TensorFlow pass it.
        """
        return self._taken("gather_nd", lambda: indices)

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Add rows to those that indices name, and return the variable.

        A collective call inside ``strategy.run``: the rows of all replicas are applied, in replica order; with MEAN each is
        divided by their number, with ONLY_FIRST_REPLICA only those of replica 0 are, with NONE the replicas' rows must be
        equal and are applied once. Outside it ranks compare their rows as `assign` does its values. Rows of one index are
        applied one after the other.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            The rows, and where they belong. Replicas may have different numbers of them, or none.
        use_locking, name : bool, str
            Without effect; accepted because programs for TensorFlow pass them.

        Raises
        ------
        NotImplementedError
            If the variable is synchronized ON_READ.
        InvalidArgumentError
            If rows have another shape than those of the variable or an index is out of range; under central storage also
            inside ``strategy.run`` with aggregation NONE.
        TypeError
            If it is not an IndexedSlices, or the operation is not defined for the kind of number.
        RuntimeError
            If another strategy than the variable's own is current.
        AgreementError
            On every replica, if they pass different rows inside ``strategy.run`` with aggregation NONE. From the next
            collective, if ranks pass different ones outside it.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Subtract rows, and return the variable; communicates and raises like `scatter_add`."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Multiply by rows, and return the variable; communicates and raises like `scatter_add`."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Divide by rows, and return the variable; communicates and raises like `scatter_add`. Integers have no quotient."""
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Keep the lesser numbers of rows and variable, and return it; communicates and raises like `scatter_update`."""
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Keep the greater numbers of rows and variable, and return it; communicates and raises like `scatter_update`."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Put rows in the place of others, and return the variable; communicates and raises like `scatter_add`.

        But inside ``strategy.run`` the aggregation must be ONLY_FIRST_REPLICA or NONE.

        Raises
        ------
        NotImplementedError
            Inside ``strategy.run`` with aggregation SUM or MEAN.
        """
        return self._scatter("scatter_update", sparse_delta)

    def scatter_nd_add(self, indices: Any, updates: Any, name: str | None = None) -> Variable:
        """Add to single entries, and return the variable; communicates and raises like `scatter_add`.

        Parameters
        ----------
        indices : array_like of int
            Its last axis holds the indices of one entry along the first axes of the variable: of all of them for a number, of
            fewer for an array.
        updates : array_like
            One for each entry, of its shape.
        name : str, optional
            Without effect; accepted because programs for TensorFlow pass it.
        """
        return self._scatter("scatter_nd_add", (indices, updates))

    def scatter_nd_sub(self, indices: Any, updates: Any, name: str | None = None) -> Variable:
        """Subtract from single entries, as `scatter_nd_add` adds to them."""
        return self._scatter("scatter_nd_sub", (indices, updates))

    def scatter_nd_min(self, indices: Any, updates: Any, name: str | None = None) -> Variable:
        """Keep the lesser numbers of updates and entries, as `scatter_nd_add` adds; communicates like `scatter_update`."""
        return self._scatter("scatter_nd_min", (indices, updates))

    def scatter_nd_max(self, indices: Any, updates: Any, name: str | None = None) -> Variable:
        """Keep the greater numbers of updates and entries, as `scatter_nd_add` adds; communicates like `scatter_update`."""
        return self._scatter("scatter_nd_max", (indices, updates))

    def scatter_nd_update(self, indices: Any, updates: Any, name: str | None = None) -> Variable:
        """Put updates in the place of single entries, as `scatter_nd_add` adds; communicates like `scatter_update`."""
        return self._scatter("scatter_nd_update", (indices, updates))

    def _taken(self, method: str, places: Callable[[], Any]) -> Array:
        """Return the entries whose indices `places` returns."""
        try:
            numbers, entry = checked_places(f"{self!r}.{method}", places(), self.shape)
        except (TypeError, ValueError) as error:
            self._refuse(method, error, Where.OUTSIDE if self._is_combined_here() else Where.HERE)
        array = self.read()
        taken = flattened(array, entry).take(like(numbers, array), axis=0)
        return in_dtype(taken, taken.dtype)  # a number is an array of no axes

    def _scatter(self, method: str, delta: Any) -> Variable:
        """Apply the rows of all whom it concerns, or for ``scatter_nd_…`` indices and updates, and return the variable."""
        raise NotImplementedError
