"""StoredVariable: a variable, or a shard of one, in the memory of its server."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.assignment import assignable
from mpistrat.state.indices import flat_indices
from mpistrat.state.scatter import apply, checked_rows

__all__ = ["SCATTER_METHODS", "StoredVariable"]

SCATTER_METHODS = (
    "scatter_add",
    "scatter_sub",
    "scatter_mul",
    "scatter_div",
    "scatter_min",
    "scatter_max",
    "scatter_update",
)


class StoredVariable:
    """What a function that ``extended.update`` calls is handed: the array of a variable or shard, and what belongs to it.

    Nothing else reads or changes the array while the function runs.

    Parameters
    ----------
    name : str
        What errors call it.
    array : ndarray
        Its first value; it is kept, and changed.

    Attributes
    ----------
    name : str
        Its name.
    """

    def __init__(self, name: str, array: Array) -> None:
        self.name, self._array = name, array
        self._slots: dict[str, Array] = {}

    @property
    def value(self) -> Array:
        """The array. It may be written to, and what is assigned is written to it."""
        return self._array

    @value.setter
    def value(self, value: Any) -> None:
        if value is not self._array:
            self._array[...] = assignable(value, self._array, self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one element."""
        return self.value.dtype

    def slot(self, name: str, initial: Any = 0, dtype: Any = None) -> Array:
        """Return state that is kept beside the variable, such as a momentum: an array of its shape, which may be written to.

        Parameters
        ----------
        name : str
            Which.
        initial : number
            What it is filled with the first time.
        dtype : dtype, optional
            The type of its elements; that of the variable by default.
        """
        if name not in self._slots:
            self._slots[name] = np.full(self.shape, initial, dtype or self.dtype)
        return self._slots[name]

    def numpy(self) -> Array:
        """Return a copy of the array."""
        copied: Array = self.value.copy()
        return copied

    def sparse_read(self, indices: Any) -> Array:
        """Return some of the rows, as a new array, as `mpistrat.Variable.sparse_read`."""
        numbers, _ = flat_indices(f"{self!r}.sparse_read", np.asarray(indices)[..., np.newaxis], self.shape)
        rows: Array = self.value[numbers]
        return rows

    def assign(self, value: Any) -> StoredVariable:
        """Set the variable to a value of its shape."""
        self.value[...] = assignable(value, self.value, self)
        return self

    def assign_add(self, delta: Any) -> StoredVariable:
        """Add an array of its shape."""
        np.add(self.value, assignable(delta, self.value, self), out=self.value)
        return self

    def assign_sub(self, delta: Any) -> StoredVariable:
        """Subtract an array of its shape."""
        np.subtract(self.value, assignable(delta, self.value, self), out=self.value)
        return self

    def scatter(self, method: str, delta: IndexedSlices) -> StoredVariable:
        """Apply rows by one of `SCATTER_METHODS`."""
        apply(method, self.value, checked_rows(method, delta, self.value, self))
        return self

    def scatter_add(self, sparse_delta: IndexedSlices) -> StoredVariable:
        """Add rows to those that indices name."""
        return self.scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> StoredVariable:
        """Subtract rows from those that indices name."""
        return self.scatter("scatter_sub", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> StoredVariable:
        """Replace the rows that indices name."""
        return self.scatter("scatter_update", sparse_delta)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.value, dtype, copy=copy)

    def __repr__(self) -> str:
        return f"StoredVariable({self.name!r}, {self.dtype} {self.shape})"
