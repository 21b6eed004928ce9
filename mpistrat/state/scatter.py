"""Scatter updates: the methods of a variable that change some of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpistrat.cross_device.sparse import IndexedSlices
    from mpistrat.state.variables import Variable

__all__ = ["ScatterUpdates"]


class ScatterUpdates:
    """What a variable does with IndexedSlices; it says itself how one is applied."""

    def scatter_add(self, sparse_delta: IndexedSlices) -> Variable:
        """Add rows to those that indices name, and return the variable.

        A collective call inside ``strategy.run``: the rows of all replicas are applied, in replica order; with MEAN each is
        divided by their number, with ONLY_FIRST_REPLICA only those of replica 0 are. In strict mode also outside it, where
        ranks then compare their rows. Rows of one index are applied one after the other.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            The rows, and where they belong. Replicas may have different numbers of them, or none.

        Raises
        ------
        NotImplementedError
            If the variable is synchronized ON_READ.
        InvalidArgumentError
            If rows have another shape than those of the variable or an index is out of range, or inside ``strategy.run`` with
            aggregation NONE.
        TypeError
            If it is no IndexedSlices, or the operation is not defined for the kind of number.
        RuntimeError
            If another strategy than the variable's own is current.
        AgreementError
            In strict mode, on every rank, if ranks pass different rows outside ``strategy.run``.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> Variable:
        """Subtract rows, and return the variable; communicates and raises like `scatter_add`."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> Variable:
        """Multiply by rows, and return the variable; communicates and raises like `scatter_add`."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> Variable:
        """Divide by rows, and return the variable; communicates and raises like `scatter_add`. Integers have no quotient."""
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> Variable:
        """Keep the lesser numbers of rows and variable, and return it; communicates and raises like `scatter_update`."""
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> Variable:
        """Keep the greater numbers of rows and variable, and return it; communicates and raises like `scatter_update`."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> Variable:
        """Put rows in the place of others, and return the variable; communicates and raises like `scatter_add`.

        But inside ``strategy.run`` the aggregation must be ONLY_FIRST_REPLICA, or NONE with rows that all replicas share.

        Raises
        ------
        NotImplementedError
            Inside ``strategy.run`` with aggregation SUM or MEAN.
        AgreementError
            On every replica, strict mode or not, if with NONE they pass different rows inside ``strategy.run``.
        """
        return self._scatter("scatter_update", sparse_delta)

    def _scatter(self, method: str, sparse_delta: IndexedSlices) -> Variable:
        """Apply the rows of all whom it concerns, and return the variable."""
        raise NotImplementedError
