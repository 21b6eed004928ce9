"""ParameterServerExtended: where variables go, and what changes them where they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpistrat.algorithms.reduce_scatter import part_bounds
from mpistrat.arrays import Array
from mpistrat.communicator.local import LocalCommunicator
from mpistrat.errors import InvalidArgumentError
from mpistrat.parameter_server.client import Client
from mpistrat.parameter_server.partition import check_partition
from mpistrat.parameter_server.server_variable import ServerVariable, ShardedVariable
from mpistrat.parameter_server.tasks import CHIEF
from mpistrat.state.aggregation import VariableSynchronization, checked_aggregation, checked_synchronization
from mpistrat.state.declaration import initial_array
from mpistrat.strategy.extended import StrategyExtended

__all__ = ["PLACEMENTS", "ParameterServerExtended", "ShardInfo"]

PLACEMENTS = ("even_bytes", "round_robin")


class ShardInfo(NamedTuple):
    """Which rows of a variable an initial value is wanted for, passed to a function that has a parameter `shard_info`.

    Attributes
    ----------
    shape : tuple of int
        The shape of the shard.
    offset : tuple of int
        Where it begins in the variable.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]


class ParameterServerExtended(StrategyExtended):
    """How a task uses the servers: the chief makes variables, and it and the workers change them.

    Parameters
    ----------
    client : Client
        To the servers.
    partitioner : callable, optional
        Into how many shards a variable is split; by default none is.
    placement : str
        ``even_bytes``: each variable or shard goes to the server with the fewest bytes; ``round_robin``: to each in turn.
    max_staleness : int, optional
        The bound of its variables: see `ParameterServerStrategy`.
    """

    def __init__(
        self,
        client: Client,
        partitioner: Callable[..., Sequence[int]] | None = None,
        placement: str = PLACEMENTS[0],
        max_staleness: int | None = None,
    ) -> None:
        group = client.channel.group
        super().__init__(
            LocalCommunicator(),
            worker_devices=[f"/job:worker/task:{index}" for index in range(len(group.workers))],
            parameter_devices=[f"/job:ps/task:{index}" for index in range(len(group.servers))],
        )
        self._client, self._partitioner, self._placement = client, partitioner, placement
        self._max_staleness = max_staleness
        self._bytes = [0] * len(group.servers)
        self._num_placed = 0
        self._beside: int | None = None

    @property
    def server_bytes(self) -> tuple[int, ...]:
        """How many bytes of variables each server keeps. Not in TensorFlow."""
        return tuple(self._bytes)

    def create_variable(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        constraint: Callable[[Any], Any] | None = None,
        synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
        aggregation: Any = None,
        shape: Sequence[int] | None = None,
    ) -> ServerVariable:
        """Return a new variable, kept by servers: what ``mpistrat.Variable`` does in the scope of the strategy, on the chief.

        Parameters
        ----------
        initial_value : array_like or callable
            As for `mpistrat.Variable`. A function with a parameter `shard_info` is called for each shard, if `shape` is given:
            so a table may be larger than the memory of the chief.
        trainable, name, dtype, shape : bool, str, dtype, sequence of int
            As for `mpistrat.Variable`.
        constraint, aggregation : callable, VariableAggregation
            Accepted as there, and without effect: an update is that of one worker.
        synchronization : VariableSynchronization
            AUTO or ON_WRITE.

        Raises
        ------
        InvalidArgumentError
            If there is no initial value, or the partitioner returns what it should not.
        NotImplementedError
            If it is to be synchronized ON_READ.
        RuntimeError
            On a worker.
        """
        name = name or "Variable"
        self._check_chief(name)
        if initial_value is None:
            raise InvalidArgumentError(f"{name} needs an initial_value: a parameter server strategy places it by its size")
        checked_aggregation(aggregation)
        if checked_synchronization(synchronization) is VariableSynchronization.ON_READ:
            raise NotImplementedError(
                f"{name}: there is one copy of it, on a server, and no copy of each replica: use ON_WRITE"
            )
        is_trainable = True if trainable is None else bool(trainable)
        initial = _initial(initial_value, dtype, shape, name)
        num_shards = self._num_shards(initial)
        if num_shards == 1:
            return self._place(name, initial.whole(), is_trainable)
        offsets = part_bounds(initial.shape[0], num_shards)
        shards = [
            self._place(f"{name}/part_{number}", initial.rows(start, stop), is_trainable)
            for number, (start, stop) in enumerate(pairwise(offsets))
        ]
        return ShardedVariable(shards, name)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(variable, *args, **kwargs)`` on the server where the variable lives; only the arguments are sent.

        `fn` gets a `StoredVariable`: it changes its ``value``, and keeps state of an optimiser in its ``slot(name)``. While it
        runs, nothing else uses the variable. It is sent once, with what it refers to. For a sharded variable it is called
        for each shard: with its rows of arguments that have the shape of the variable, and of IndexedSlices.

        Parameters
        ----------
        var : ServerVariable
            The variable to change.
        fn : callable
            What to do to it.
        args, kwargs : sequence, mapping
            Passed on.
        group : bool
            Whether the results are of no interest: then None is returned.

        Returns
        -------
        None or list
            What `fn` returned, for each shard.

        Raises
        ------
        Exception
            The error of `fn`.
        TypeError
            If `var` is not a variable that servers keep, or something cannot be pickled.
        """
        if not isinstance(var, ServerVariable):
            raise TypeError(f"extended.update of a parameter server strategy changes variables on servers; got {var!r}")
        results = var.update_where_it_lives(fn, args, kwargs or {}, not group)
        return None if group else results

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a variable was made under this strategy."""
        return isinstance(v, ServerVariable) and v.is_of(self._client)

    def value_container(self, value: Any) -> Any:
        """Return the value: a variable on a server is its own container."""
        return value

    def read_var(self, v: Any) -> Any:
        """Return the array of a variable, as it is now."""
        return v.read()

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Place the variables that are made inside with another one, on the server of its first shard, and whole.

        Raises
        ------
        InvalidArgumentError
            If `colocate_with_variable` was not made under this strategy.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise InvalidArgumentError(f"colocate_vars_with takes a variable of this strategy; got {colocate_with_variable!r}")
        outer, self._beside = self._beside, colocate_with_variable.server
        try:
            yield
        finally:
            self._beside = outer

    def _check_chief(self, name: str) -> None:
        group = self._client.channel.group
        if group.task_type != CHIEF:
            raise RuntimeError(
                f"{name} was made in a function that {self._client.channel.name} runs: make variables on the chief, in "
                "strategy.scope(), and use them in the function"
            )

    def _num_shards(self, initial: _Initial) -> int:
        if self._partitioner is None or self._beside is not None or not initial.shape:
            return 1
        return check_partition(self._partitioner(initial.shape, initial.dtype, axis=0), initial.shape)

    def _place(self, name: str, array: Array, trainable: bool) -> ServerVariable:
        server = self._next_server()
        array = np.asarray(array, order="C")
        placed = self._client.create(server, name, array)
        self._bytes[server] += array.nbytes
        self._num_placed += 1
        rows = array.shape[0] if array.ndim else 0
        number = self._client.channel.group.number
        return ServerVariable(name, number, (placed,), (0, rows), array.shape, array.dtype, trainable, self._max_staleness)

    def _next_server(self) -> int:
        if self._beside is not None:
            return self._beside
        if self._placement == "round_robin":
            return self._num_placed % len(self._bytes)
        return self._bytes.index(min(self._bytes))


class _Initial(NamedTuple):
    """The initial value of a variable: its shape and dtype, and what returns some of its rows, or all of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: Callable[[int, int], Array]
    whole: Callable[[], Array]


def _initial(value: Any, dtype: Any, shape: Sequence[int] | None, name: str) -> _Initial:
    if shape and callable(value) and "shard_info" in inspect.signature(value).parameters:
        extents, kind = tuple(shape), np.dtype(dtype or np.float32)

        def rows(start: int, stop: int) -> Array:
            shard = (stop - start, *extents[1:])
            info = ShardInfo(shard, (start, *[0] * (len(extents) - 1)))
            return initial_array(lambda: value(shard_info=info), kind, shard, name)

        return _Initial(extents, kind, rows, lambda: rows(0, extents[0]))
    array = initial_array(value, dtype, shape, name)
    return _Initial(array.shape, array.dtype, lambda start, stop: array[start:stop], lambda: array)
