"""Variables that servers keep: as the chief and the workers see them, whole or in shards, and as functions on servers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpistrat.arrays import Array, as_array, to_host
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.values import Mirrored
from mpistrat.errors import InvalidArgumentError
from mpistrat.parameter_server.client import Client, VariableRef, current_client, open_clients
from mpistrat.state import changes
from mpistrat.state.changes import ChangeMethods, apply, check_rows, checked, entries, flat_indices
from mpistrat.state.variables import Variable
from mpistrat.structures import map_leaves

if TYPE_CHECKING:
    from typing_extensions import Self


@Variable.register
class ServerVariable(ChangeMethods, Mirrored):
    """An array that a server keeps: ``mpistrat.Variable`` in the scope of a `ParameterServerStrategy` returns one.

    It can be used like an array, and is read from its server each time. Workers may read and change it at any time, without
    waiting for each other; each change is made as a whole, and no reader sees half of one.

    Attributes
    ----------
    name : str
        What errors call it.
    trainable : bool
        Whether an optimiser should change it.
    synchronization, aggregation, constraint : VariableSynchronization, VariableAggregation, None
        ON_WRITE, NONE and None: an update is that of one worker.
    """

    synchronization, aggregation = changes.VariableSynchronization.ON_WRITE, changes.VariableAggregation.NONE
    constraint = None
    _in_place = "strategy.extended.update(variable, fn, (value,))"

    def __init__(self, name: str, ref: VariableRef, shape: tuple[int, ...], dtype: np.dtype[Any], trainable: bool) -> None:
        super().__init__(np.broadcast_to(np.zeros((), dtype), shape))  # what a value must fit; takes no memory
        self.name, self.trainable = name, trainable
        self._refs: tuple[VariableRef, ...] = (ref,)
        self._offsets: Sequence[int] = (0, len(self) if shape else 0)

    @property
    def values(self) -> tuple[Any, ...]:
        """The variable itself, which is its only component."""
        return (self,)

    @property
    def value(self) -> Array:
        """The array, as it is now: a copy."""
        return self.read()

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that made it; on a worker, that of the functions which run there. None once that is closed."""
        return next((client.strategy for client in open_clients() if client.channel.number == self.group), None)

    @property
    def server(self) -> int:
        """The task id of the server that keeps it; of a sharded variable that of the first shard."""
        return self._refs[0].server

    @property
    def group(self) -> int:
        """The number of the group of tasks in which servers keep it."""
        return self._refs[0].group

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
        return self._rows(0, self._offsets[-1])

    numpy = read_value = read
    is_initialized = Variable.is_initialized

    def sparse_read(self, indices: Any, name: str | None = None) -> Array:
        """Return some of the rows; all servers are asked at the same time, and once for a row that is named often.

        Parameters
        ----------
        indices : array_like of int
            Which rows, in any shape, from 0; the result has this shape and then that of a row.
        name : str, optional
            Without effect; accepted because programs for TensorFlow pass it.
        """
        numbers, row = flat_indices(f"{self.name}.sparse_read", as_array(indices, "indices")[..., np.newaxis], self.shape)
        wanted, position = np.unique(numbers, return_inverse=True)
        rows = np.empty((len(wanted), *row), self.dtype)
        shares = self._shares(self._bounds(wanted))
        self._client().read([(ref, wanted[own] - offset, rows[own]) for ref, offset, own in shares])
        return rows.take(position.reshape(-1), 0, mode="clip").reshape((*numbers.shape, *row))

    def gather_nd(self, indices: Any, name: str | None = None) -> Array:
        """Return single entries, as `mpistrat.Variable.gather_nd`; the whole array is read for them."""
        named = flat_indices(f"{self.name}.gather_nd", indices, self.shape)
        return entries(self.read(), *named)

    def update_where_it_lives(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], wants_results: bool
    ) -> list[Any]:
        """Call a function on the server of each shard, and return the results; what ``extended.update`` calls."""
        given = (tuple(args), dict(kwargs))
        bounds = zip(self._refs, self._offsets, self._offsets[1:], strict=False)
        parts = [(ref, *map_leaves(partial(self._argument_of_shard, *rows), given)) for ref, *rows in bounds]
        return self._client().update(fn, parts, wants_results)

    def __getitem__(self, index: Any) -> Any:
        """Return some of the elements, as NumPy does: a copy.

        Only the rows that an int, or a slice without a step, names are sent; for other indices all are. `sparse_read` has only
        the rows sent whose ids it is given.
        """
        if self.shape and isinstance(index, slice) and index.step in (None, 1):
            rows = range(len(self))[index]
            return self._rows(rows.start, rows.start + len(rows))
        if self.shape and isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            row = range(len(self))[index]
            return self._rows(row, row + 1)[0]
        return self.read()[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return ServerVariable, (self.name, self._refs[0], self.shape, self.dtype, self.trainable)

    def __deepcopy__(self, memo: dict[int, Any]) -> ServerVariable:
        """Return a new variable with the same elements, which the chief alone can make."""
        copied: ServerVariable = self._client().strategy.extended.create_variable(self.read(), self.trainable, self.name)
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.dtype} {self.shape})"

    def _client(self) -> Client:
        return current_client(self.group)

    def _bounds(self, indices: Array) -> list[int]:
        """Return where the indices of each shard begin, and the last ones end; those of several shards are ascending."""
        return np.searchsorted(indices, self._offsets).tolist() if len(self._refs) > 1 else [0, len(indices)]

    def _shares(self, bounds: list[int]) -> Iterator[tuple[VariableRef, int, slice]]:
        """Yield where shards are, their first rows, and the part between two bounds, of those that have any."""
        for ref, offset, start, stop in zip(self._refs, self._offsets, bounds, bounds[1:], strict=False):
            if start < stop:
                yield ref, offset, slice(start, stop)

    def _parts(self, array: Array, start: int) -> list[tuple[VariableRef, int, Array]]:
        """Return which part of an array, the rows of the variable from one on, belongs to each shard, and where it begins."""
        if len(self._refs) == 1:
            return [(self._refs[0], start, array)]
        shares = self._shares(np.clip(np.subtract(self._offsets, start), 0, len(array)).tolist())
        return [(ref, start + own.start - offset, array[own]) for ref, offset, own in shares]

    def _rows(self, start: int, stop: int) -> Array:
        rows = np.empty((stop - start, *self.shape[1:]) if self.shape else (), self.dtype)
        self._client().read(self._parts(rows, start))
        return rows

    def _change(self, method: str, value: Any) -> Self:
        values, *rest = map(to_host, checked(method, value, self._component, self))
        if not rest:
            whole = np.asarray(values, order="C")
            self._client().write(method, [(ref, part, None) for ref, _, part in self._parts(whole, 0)])
            return self
        [indices] = rest
        if len(self._refs) > 1:
            order = np.argsort(indices, kind="stable")  # rows of one index stay in their order
            values, indices = values[order], indices[order]
        shares = self._shares(self._bounds(indices))
        parts = [(ref, np.ascontiguousarray(values[own]), indices[own] - offset) for ref, offset, own in shares]
        self._client().write(method, parts)
        return self

    def _argument_of_shard(self, start: int, stop: int, leaf: Any) -> Any:
        """Return what the function gets for an argument on one shard: of an array of the variable's shape, its rows."""
        if len(self._refs) == 1:
            return leaf
        if isinstance(leaf, IndexedSlices):
            indices, shape = to_host(leaf.indices), leaf.dense_shape
            check_rows(indices, len(self), self)
            chosen = (indices >= start) & (indices < stop)
            dense_shape = None if shape is None else (stop - start, *shape[1:])
            return IndexedSlices(to_host(leaf.values)[chosen], indices[chosen] - start, dense_shape)
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
        if not first.shape or any(one.group != first.group for one in variables):
            raise InvalidArgumentError(f"the shards of {name} must be of one strategy, and have rows; got {variables!r}")
        offsets = np.cumsum([0, *map(len, variables)]).tolist()
        trainable = all(one.trainable for one in variables)
        super().__init__(name, first._refs[0], (offsets[-1], *first.shape[1:]), first.dtype, trainable)
        self._refs, self._offsets = tuple(one._refs[0] for one in variables), offsets
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


class StoredVariable(ChangeMethods, Mirrored):
    """What a function that ``extended.update`` calls is handed: the array of a variable or shard, and what belongs to it.

    It can be used like an array. Nothing else reads or changes that while the function runs.

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

    _in_place = "variable.value[index] = value"

    def __init__(self, name: str, array: Array) -> None:
        super().__init__(array)
        self.name = name
        self._slots: dict[str, Array] = {}

    @property
    def value(self) -> Array:
        """The array. It may be written to, and what is assigned is written to it."""
        return cast("Array", self._component)

    @value.setter
    def value(self, value: Any) -> None:
        if value is not self._component:
            self.assign(value)

    def slot(self, name: str) -> Array:
        """Return state that is kept beside the variable, such as a momentum: an array like it, zeros at first.

        It may be written to.

        Parameters
        ----------
        name : str
            Which.
        """
        if name not in self._slots:
            self._slots[name] = np.zeros(self.shape, self.dtype)
        return self._slots[name]

    def numpy(self) -> Array:
        """Return a copy of the array."""
        return self.value.copy()

    def sparse_read(self, indices: Any, name: str | None = None) -> Array:
        """Return some of the rows, as a new array, as `mpistrat.Variable.sparse_read`."""
        numbers, _ = flat_indices(f"{self!r}.sparse_read", np.asarray(indices)[..., np.newaxis], self.shape)
        return self.value[numbers]

    def _change(self, method: str, value: Any) -> Self:
        apply(method, self.value, checked(method, value, self.value, self))
        return self

    def __repr__(self) -> str:
        return f"StoredVariable({self.name!r}, {self.dtype} {self.shape})"


def embedding_lookup(params: Any, ids: Any) -> Array:
    """Return the rows of a table that ids name, as ``tf.nn.embedding_lookup`` does.

    Of a table that servers keep, all servers are asked at the same time, and for each row once, however often its id occurs.

    Parameters
    ----------
    params : ServerVariable, ShardedVariable, Variable or array
        The table.
    ids : array_like of int
        Which rows, in any shape, from 0; the result has this shape and then that of a row.
    """
    table = params if hasattr(params, "sparse_read") else StoredVariable("params", as_array(params, "params"))
    return cast("Array", table.sparse_read(ids))
