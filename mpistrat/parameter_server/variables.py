"""Variables that servers keep: as the chief and the workers see them, whole or in shards, and as functions on servers do."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, to_host
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.values import DistributedValues, assignable
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.parameter_server.client import Client, Placed, current_client
from mpistrat.state.scatter import ScatterMethods, apply, checked_rows, flat_indices
from mpistrat.state.variables import Variable, register
from mpistrat.structures import map_leaves

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ServerVariable", "ShardedVariable", "StoredVariable", "embedding_lookup", "select_rows"]


class _Changes(ScatterMethods):
    """How a variable is changed, wherever its array is."""

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the variable to a value, and return it.

        The value has been taken when this returns, and may be changed. This rank reads it from then on; others do when this
        rank's function has ended, or before.

        Parameters
        ----------
        value : array_like
            Of the variable's shape.
        use_locking, name : bool, str
            Without effect; accepted because programs for TensorFlow pass them.
        read_value : bool
            Whether to return the variable.

        Raises
        ------
        InvalidArgumentError
            If the shapes differ.
        UnsupportedDtypeError
            If the kind of number does not fit.
        """
        return self._change("assign", value, read_value)

    def assign_add(self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Add to the variable, and return it; all as for `assign`. What several ranks add at the same time is all added."""
        return self._change("assign_add", delta, read_value)

    def assign_sub(self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Subtract from the variable, as `assign_add` adds to it. Not defined for booleans."""
        return self._change("assign_sub", delta, read_value)

    def _change(self, method: str, value: Any, read_value: bool) -> Any:
        raise NotImplementedError


class ServerVariable(_Changes, DistributedValues):
    """An array that a server keeps: ``mpistrat.Variable`` in the scope of a `ParameterServerStrategy` returns one.

    It can be used like an array, and is read from its server each time. Workers may read and change it at any time, without
    waiting for each other; each change is made as a whole, and no reader sees half of one.

    Attributes
    ----------
    name : str
        What errors call it.
    shape : tuple of int
        Its extents.
    dtype : dtype
        Type of one element.
    trainable : bool
        Whether an optimiser should change it.
    """

    def __init__(
        self,
        name: str,
        group: int,
        places: tuple[Placed, ...],
        offsets: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        trainable: bool = True,
    ) -> None:
        self.name, self.shape, self.dtype, self.trainable = name, shape, dtype, trainable
        self._group, self._places, self._offsets = group, places, offsets
        self._like = np.broadcast_to(np.zeros((), dtype), shape)  # what a value must fit; takes no memory

    @property
    def values(self) -> tuple[Any, ...]:
        """The variable itself, which is its only component."""
        return (self,)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._like.size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def value(self) -> Array:
        """The array, as it is now: a copy."""
        return self.read()

    @property
    def server(self) -> int:
        """The task id of the server that keeps it; of a sharded variable that of the first shard."""
        return self._places[0].server

    def is_of(self, client: Client) -> bool:
        """Return whether the servers of a client keep it."""
        return self._group == client.channel.group.number

    def in_replica(self) -> ServerVariable:
        """Return the variable."""
        return self

    def read(self) -> Array:
        """Return the array, as it is now: a copy.

        Shards are read at the same time, but not as of one moment: another rank may change one after the other meanwhile.

        Raises
        ------
        DeadlineExceededError
            If a server has not answered within MPISTRAT_TIMEOUT_SECONDS.
        RuntimeError
            If the strategy was closed, or this is neither the chief nor a function that a worker runs.
        """
        return self._rows(0, self.shape[0] if self.shape else 0)

    def numpy(self) -> Array:
        """Return the same as `read`."""
        return self.read()

    def read_value(self) -> Array:
        """Return the same as `read`."""
        return self.read()

    def sparse_read(self, indices: Any, name: str | None = None) -> Array:
        """Return some of the rows; each server is asked once, for those that it has, and once for a row that is named often.

        Parameters
        ----------
        indices : array_like of int
            Which rows, in any shape; the result has this shape and then that of a row.
        name : str, optional
            Without effect; accepted because programs for TensorFlow pass it.

        Raises
        ------
        InvalidArgumentError
            If an index is negative or out of range, or the variable has no axis.
        UnsupportedDtypeError
            If the indices are not integers.
        """
        numbers, row = flat_indices(f"{self.name}.sparse_read", as_array(indices, "indices")[..., np.newaxis], self.shape)
        wanted = numbers.reshape(-1)
        rows, client = np.empty((len(wanted), *row), self.dtype), self._client()
        if len(self._places) == 1:
            client.read_rows([(self._places[0], wanted)], rows)
            return rows.reshape(*numbers.shape, *row)
        # the rows of one server arrive together
        parts = sorted(range(len(self._places)), key=lambda part: self._places[part].server)
        turn = np.argsort(parts)[np.searchsorted(self._offsets, wanted, "right") - 1]
        order = np.argsort(turn, kind="stable")
        bounds = np.searchsorted(turn[order], np.arange(len(parts) + 1))
        spans = [(part, order[start:stop]) for part, (start, stop) in zip(parts, pairwise(bounds), strict=True) if start < stop]
        client.read_rows([(self._places[part], wanted[span] - self._offsets[part]) for part, span in spans], rows)
        found = np.empty_like(rows)
        found[order] = rows
        return found.reshape(*numbers.shape, *row)

    def update_where_it_lives(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], wants_results: bool
    ) -> list[Any]:
        """Call a function on the server of each shard, and return the results; what ``extended.update`` calls."""
        given = (tuple(args), dict(kwargs))
        shares = [map_leaves(lambda leaf, part=part: self._share(leaf, part), given) for part in range(len(self._places))]
        parts = [(place, *share) for place, share in zip(self._places, shares, strict=True)]
        return self._client().update(fn, parts, wants_results)

    def __getitem__(self, index: Any) -> Any:
        """Return some of the elements, as NumPy does: a copy.

        Only the rows that an int, a slice or a list of ints on the first axis names are sent; for other indices all are.
        """
        selected = select_rows(index, self.shape[0]) if self.shape else None
        if selected is None:
            return self.read()[index]
        rows = selected.rows
        if isinstance(rows, range) and rows.step == 1:
            found = self._rows(rows.start, max(rows.start, rows.stop))
        else:
            found = self.sparse_read(np.asarray(rows, np.int64))
        return found[selected.inner]

    def __len__(self) -> int:
        return len(self._like)

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerVariable, (
            self.name,
            self._group,
            self._places,
            self._offsets,
            self.shape,
            self.dtype,
            self.trainable,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.dtype} {self.shape})"

    def _client(self) -> Client:
        return current_client(self._group)

    def _bounds(self, start: int, stop: int) -> Iterator[tuple[Placed, int, int, int]]:
        """Yield the shards that have some of these rows: where each is, where it begins, and the rows that it has of them."""
        part = bisect_right(self._offsets, start, 0, len(self._places)) - 1
        while part < len(self._places) and self._offsets[part] < stop:
            yield (
                self._places[part],
                self._offsets[part],
                max(start, self._offsets[part]),
                min(stop, self._offsets[part + 1]),
            )
            part += 1

    def _rows(self, start: int, stop: int) -> Array:
        if not self.shape:
            array = np.empty((), self.dtype)
            self._client().read([(self._places[0], 0, array)])
            return array
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        parts = [
            (place, first - offset, rows[first - start : last - start])
            for place, offset, first, last in self._bounds(start, stop)
        ]
        self._client().read(parts)
        return rows

    def _change(self, method: str, value: Any, read_value: bool) -> Any:
        if method == "assign_sub" and self.dtype.kind == "b":
            raise UnsupportedDtypeError(
                f"{self!r}.assign_sub is not defined for bool; accepted are integers, floats and complex"
            )
        array = np.asarray(to_host(assignable(value, self._like, self)), order="C")
        if not self.shape:
            parts = [(self._places[0], 0, array)]
        else:
            parts = [
                (place, first - offset, array[first:last]) for place, offset, first, last in self._bounds(0, self.shape[0])
            ]
        self._client().write(method, parts)
        return self if read_value else None

    def _scatter(self, method: str, delta: IndexedSlices) -> Self:
        values, indices = map(to_host, checked_rows(method, delta, self._like, self))
        if len(self._places) > 1:
            order = np.argsort(indices, kind="stable")  # rows of one index stay in their order
            values, indices = values[order], indices[order]
        bounds = np.searchsorted(indices, self._offsets) if len(self._places) > 1 else [0, len(indices)]
        parts = [
            (
                place,
                np.ascontiguousarray(indices[start:stop] - offset),
                np.ascontiguousarray(values[start:stop]),
            )
            for place, offset, start, stop in zip(self._places, self._offsets, bounds, bounds[1:], strict=False)
        ]
        self._client().scatter(method, parts)
        return self

    def _share(self, leaf: Any, part: int) -> Any:
        """Return what the function gets for an argument on one shard: of an array of the variable's shape, its rows."""
        if len(self._places) == 1:
            return leaf
        start, stop = self._offsets[part : part + 2]
        if isinstance(leaf, IndexedSlices):
            indices = to_host(leaf.indices)
            chosen = (indices >= start) & (indices < stop)
            return IndexedSlices(to_host(leaf.values)[chosen], indices[chosen] - start)
        return leaf[start:stop] if isinstance(leaf, np.ndarray) and leaf.shape == self.shape else leaf


class ShardedVariable(ServerVariable):
    """A variable whose rows are split over several servers; it can be used like an unsplit one.

    The scope of a `ParameterServerStrategy` with a partitioner makes them.

    Parameters
    ----------
    variables : sequence of ServerVariable
        The shards, in the order of their rows.
    name : str
        What errors call it.

    Raises
    ------
    TypeError
        If it is not a sequence of variables that servers keep, or there are none.
    InvalidArgumentError
        If the shards differ in dtype, or in their shapes except for the number of rows.
    """

    def __init__(self, variables: Sequence[ServerVariable], name: str = "ShardedVariable") -> None:
        if not isinstance(variables, Sequence) or not variables or not all(type(one) is ServerVariable for one in variables):
            raise TypeError(f"variables must be a list of one or more variables that servers keep; got {variables!r}")
        first = variables[0]
        for what, of in (("dtype", [one.dtype for one in variables]), ("shape of a row", [one.shape[1:] for one in variables])):
            if any(one != of[0] for one in of):
                raise InvalidArgumentError(f"the shards of {name} must have the same {what}; got {', '.join(map(str, of))}")
        if not first.shape or any(one._group != first._group for one in variables):
            raise InvalidArgumentError(f"the shards of {name} must be of one strategy, and have rows; got {variables!r}")
        offsets = np.cumsum([0, *(one.shape[0] for one in variables)]).tolist()
        super().__init__(
            name,
            first._group,
            tuple(one._places[0] for one in variables),
            tuple(offsets),
            (offsets[-1], *first.shape[1:]),
            first.dtype,
            all(one.trainable for one in variables),
        )
        self._variables = tuple(variables)

    @property
    def variables(self) -> list[ServerVariable]:
        """The shards."""
        return list(self._variables)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the shards."""
        return iter(self._variables)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedVariable, (self._variables, self.name)


register(Variable, ServerVariable)


class StoredVariable(_Changes):
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

    def _change(self, method: str, value: Any, read_value: bool) -> Any:
        value = assignable(value, self.value, self)
        if method == "assign":
            self.value[...] = value
        else:
            (np.add if method == "assign_add" else np.subtract)(self.value, value, out=self.value)
        return self if read_value else None

    def _scatter(self, method: str, delta: IndexedSlices) -> Self:
        apply(method, self.value, checked_rows(method, delta, self.value, self))
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.value, dtype, copy=copy)

    def __repr__(self) -> str:
        return f"StoredVariable({self.name!r}, {self.dtype} {self.shape})"


def embedding_lookup(params: Any, ids: Any) -> Array:
    """Return the rows of a table that ids name, as ``tf.nn.embedding_lookup`` does.

    Of a table that servers keep, each server is asked once, and for each row once, however often its id occurs.

    Parameters
    ----------
    params : ServerVariable, ShardedVariable or Variable
        The table.
    ids : array_like of int
        Which rows, in any shape; the result has this shape and then that of a row.

    Raises
    ------
    InvalidArgumentError
        If an id is negative or out of range.
    """
    rows: Array = params.sparse_read(ids)
    return rows


class RowSelection(NamedTuple):
    """Rows of an array, and what else an index says about them: ``array[index]`` is ``array[rows][inner]``.

    Attributes
    ----------
    rows : range or ndarray of int64
        The rows; a range ascends.
    inner : tuple
        The index into the array of these rows.
    """

    rows: range | Array
    inner: tuple[Any, ...]


def select_rows(index: Any, num_rows: int) -> RowSelection | None:
    """Return the rows that an index names; None if it names none of the first axis, as a mask or a new axis does.

    Raises
    ------
    IndexError
        If a row is out of range.

    >>> select_rows((slice(None, None, -2), 1), 6)
    RowSelection(rows=range(1, 6, 2), inner=(slice(None, None, -1), 1))
    """
    first, *others = index if isinstance(index, tuple) and index else (index,)
    if first is Ellipsis and not others:
        return RowSelection(range(num_rows), (slice(None),))
    if isinstance(first, slice):
        rows = range(num_rows)[first]
        return RowSelection(rows, (slice(None), *others)) if rows.step > 0 else RowSelection(rows[::-1], (_BACKWARDS, *others))
    if isinstance(first, bool):
        return None
    if isinstance(first, (int, np.integer)):
        row = range(num_rows)[first]
        return RowSelection(range(row, row + 1), (0, *others))
    named = np.asarray(first) if isinstance(first, (list, np.ndarray)) else np.zeros(0)
    if named.dtype.kind not in "iu" or not all(part is Ellipsis or isinstance(part, (int, slice)) for part in others):
        return None
    if named.size and not -num_rows <= int(named.min()) <= int(named.max()) < num_rows:
        raise IndexError(f"rows must be {-num_rows} to {num_rows - 1}; got {int(named.min())} to {int(named.max())}")
    return RowSelection(np.where(named < 0, named + num_rows, named).astype(np.int64), (*[slice(None)] * named.ndim, *others))


_BACKWARDS = slice(None, None, -1)
