"""Deprecated names of TensorFlow: each warns, and does what the current name does.

Functions with a `self` are methods of `Strategy`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.context.input_context import InputContext
from mpistrat.inputs.array_dataset import ArrayDataset
from mpistrat.reduction import ReduceOp

__all__ = [
    "colocate_vars_with",
    "configure",
    "experimental_distribute_datasets_from_function",
    "experimental_make_numpy_dataset",
    "experimental_run",
    "get_loss_reduction",
    "group",
    "make_dataset_iterator",
    "make_input_fn_iterator",
    "merge_hints",
    "unwrap",
    "update_config_proto",
]


def get_loss_reduction() -> ReduceOp:
    """Return SUM: losses are summed over replicas, so divide them by the global batch size.

    .. deprecated:: TensorFlow 2.0
        The result is always SUM.
    """
    _warn("get_loss_reduction()", "the sum of losses divided by the global batch size; it always returns SUM")
    return ReduceOp.SUM


def merge_hints(
    options: CommunicationOptions | None, experimental_hints: CommunicationOptions | None
) -> CommunicationOptions | None:
    """Return `options` merged over `experimental_hints`, their old name, which warns."""
    if experimental_hints is None:
        return options
    warnings.warn("experimental_hints= is deprecated; use options=", DeprecationWarning, stacklevel=3)
    return experimental_hints.merge(options)


def unwrap(self: Any, value: Any) -> tuple[Any, ...]:
    """Return ``experimental_local_results(value)``.

    .. deprecated:: TensorFlow 2.0
    """
    _warn("strategy.unwrap", "strategy.experimental_local_results(value)")
    results: tuple[Any, ...] = self.experimental_local_results(value)
    return results


def group(self: Any, value: Any, name: str | None = None) -> None:
    """Do nothing: returned values have been computed.

    .. deprecated:: TensorFlow 2.0
    """
    _warn("strategy.group", "the value itself")


def configure(
    self: Any,
    session_config: Any = None,
    cluster_spec: Any = None,
    task_type: str | None = None,
    task_id: int | None = None,
) -> None:
    """Do nothing: there is no session.

    .. deprecated:: TensorFlow 2.0

    Raises
    ------
    NotImplementedError
        If a cluster or a task is passed: a strategy takes these when it is created.
    """
    _warn("strategy.configure", "MultiWorkerMirroredStrategy(cluster_resolver)")
    if (cluster_spec, task_type, task_id) != (None, None, None):
        raise NotImplementedError(
            f"a strategy cannot be moved to another cluster: got cluster_spec={cluster_spec!r}, task_type={task_type!r}, "
            f"task_id={task_id!r}.\n"
            "    incorrect:  strategy.configure(cluster_spec=spec, task_type=kind, task_id=index)\n"
            "    correct:    mpistrat.MultiWorkerMirroredStrategy(cluster_resolver)"
        )


def update_config_proto(self: Any, config_proto: Any) -> Any:
    """Return `config_proto` unchanged: there is no session.

    .. deprecated:: TensorFlow 2.0
    """
    _warn("strategy.update_config_proto", "CommunicationOptions")
    return config_proto


def experimental_run(self: Any, fn: Callable[..., Any], input_iterator: Iterator[Any] | None = None) -> Any:
    """Return ``run(fn, args=(next(input_iterator),))``, or ``run(fn)`` without an iterator.

    .. deprecated:: TensorFlow 2.0
    """
    _warn("strategy.experimental_run", "strategy.run(fn, args=(next(iterator),))")
    return self.run(fn) if input_iterator is None else self.run(fn, (next(input_iterator),))


def make_dataset_iterator(self: Any, dataset: Any) -> Iterator[Any]:
    """Return ``iter(experimental_distribute_dataset(dataset))``. A collective call.

    .. deprecated:: TensorFlow 2.0
    """
    _warn("strategy.make_dataset_iterator", "iter(strategy.experimental_distribute_dataset(dataset))")
    return iter(self.experimental_distribute_dataset(dataset))


def make_input_fn_iterator(self: Any, input_fn: Callable[[InputContext], Any], replication_mode: Any = None) -> Iterator[Any]:
    """Return ``iter(distribute_datasets_from_function(input_fn))``. A collective call.

    .. deprecated:: TensorFlow 2.0

    Raises
    ------
    NotImplementedError
        If the replication mode is not PER_WORKER, the default.
    """
    _warn("strategy.make_input_fn_iterator", "iter(strategy.distribute_datasets_from_function(input_fn))")
    if getattr(replication_mode, "name", "PER_WORKER") != "PER_WORKER":
        raise NotImplementedError(
            f"make_input_fn_iterator takes replication mode PER_WORKER, got {replication_mode}.\n"
            "    correct:    strategy.distribute_datasets_from_function(input_fn, "
            "mpistrat.InputOptions(experimental_replication_mode=…))"
        )
    return iter(self.distribute_datasets_from_function(input_fn))


def experimental_make_numpy_dataset(self: Any, numpy_input: Any, session: Any = None, *, batch_size: int) -> ArrayDataset:
    """Return ``ArrayDataset(numpy_input, batch_size)``.

    .. deprecated:: TensorFlow 2.0

    Parameters
    ----------
    numpy_input : nest of array_like
        Arrays of equal length along the first axis.
    session : object
        Not used.
    batch_size : int
        Rows of a global batch. TensorFlow's dataset consists of single rows; here a dataset consists of batches.
    """
    _warn("strategy.experimental_make_numpy_dataset", "mpistrat.ArrayDataset(arrays, batch_size)")
    return ArrayDataset(numpy_input, batch_size)


def experimental_distribute_datasets_from_function(
    self: Any, dataset_fn: Callable[[InputContext], Any], options: Any = None
) -> Iterable[Any]:
    """Return ``distribute_datasets_from_function(dataset_fn, options)``. A collective call.

    .. deprecated:: TensorFlow 2.4
    """
    _warn("strategy.experimental_distribute_datasets_from_function", "strategy.distribute_datasets_from_function(dataset_fn)")
    dataset: Iterable[Any] = self.distribute_datasets_from_function(dataset_fn, options)
    return dataset


def colocate_vars_with(self: Any, colocate_with_variable: Any) -> AbstractContextManager[None]:
    """Return ``extended.colocate_vars_with(variable)``.

    .. deprecated:: TensorFlow 2.0
    """
    _warn("strategy.colocate_vars_with", "strategy.extended.colocate_vars_with(variable)")
    colocated: AbstractContextManager[None] = self.extended.colocate_vars_with(colocate_with_variable)
    return colocated


def _warn(name: str, present: str) -> None:
    warnings.warn(f"{name} is deprecated; use {present}", DeprecationWarning, stacklevel=3)
