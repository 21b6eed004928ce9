"""Deprecated names of TensorFlow: each warns, and does what the current name does; and options that have no effect here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.context.input_context import InputContext
from mpistrat.inputs.sources import ArrayDataset
from mpistrat.reduction import ReduceOp

_Method = TypeVar("_Method", bound=Callable[..., Any])


class RunOptions(NamedTuple):
    """Options of ``strategy.run`` for TPUs. Accepted, without effect."""

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


def get_loss_reduction() -> ReduceOp:
    """Return SUM: losses are summed over replicas, so divide them by the global batch size. Deprecated in TensorFlow 2.0."""
    present = "the sum of losses divided by the global batch size; it always returns SUM"
    warnings.warn(f"get_loss_reduction() is deprecated; use {present}", DeprecationWarning, stacklevel=2)
    return ReduceOp.SUM


def merge_hints(
    options: CommunicationOptions | None, experimental_hints: CommunicationOptions | None
) -> CommunicationOptions | None:
    """Return `options` merged over `experimental_hints`, their old name, which warns."""
    if experimental_hints is None:
        return options
    warnings.warn("experimental_hints= is deprecated; use options=", DeprecationWarning, stacklevel=3)
    return experimental_hints.merge(options)


def _old(present: str) -> Callable[[_Method], _Method]:
    """Make a method warn that its name is deprecated, and which is the present one."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def warning(*args: Any, **kwargs: Any) -> Any:
            text = f"strategy.{method.__name__} is deprecated; use {present}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return method(*args, **kwargs)

        return warning  # type: ignore[return-value]

    return decorate


class DeprecatedNames:
    """The methods of `Strategy` that TensorFlow has deprecated, most of them since 2.0."""

    @_old("strategy.experimental_local_results(value)")
    def unwrap(self: Any, value: Any) -> Any:
        """Return ``experimental_local_results(value)``."""
        return self.experimental_local_results(value)

    @_old("the value itself")
    def group(self, value: Any, name: str | None = None) -> None:
        """Do nothing: returned values have been computed."""

    @_old("MultiWorkerMirroredStrategy(cluster_resolver)")
    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Do nothing: there is no session. A cluster or a task is refused."""
        if (cluster_spec, task_type, task_id) != (None, None, None):
            raise NotImplementedError(
                f"a strategy cannot be moved to another cluster: got cluster_spec={cluster_spec!r}, task_type={task_type!r}, "
                f"task_id={task_id!r}.\n"
                "    incorrect:  strategy.configure(cluster_spec=spec, task_type=kind, task_id=index)\n"
                "    correct:    mpistrat.MultiWorkerMirroredStrategy(cluster_resolver)"
            )

    @_old("CommunicationOptions")
    def update_config_proto(self, config_proto: Any) -> Any:
        """Return `config_proto` unchanged: there is no session."""
        return config_proto

    @_old("strategy.run(fn, args=(next(iterator),))")
    def experimental_run(self: Any, fn: Callable[..., Any], input_iterator: Iterator[Any] | None = None) -> Any:
        """Return ``run(fn, args=(next(input_iterator),))``, or ``run(fn)`` without an iterator."""
        return self.run(fn) if input_iterator is None else self.run(fn, (next(input_iterator),))

    @_old("iter(strategy.experimental_distribute_dataset(dataset))")
    def make_dataset_iterator(self: Any, dataset: Any) -> Iterator[Any]:
        """Return ``iter(experimental_distribute_dataset(dataset))``. A collective call."""
        return iter(self.experimental_distribute_dataset(dataset))

    @_old("iter(strategy.distribute_datasets_from_function(input_fn))")
    def make_input_fn_iterator(
        self: Any, input_fn: Callable[[InputContext], Any], replication_mode: Any = None
    ) -> Iterator[Any]:
        """Return ``iter(distribute_datasets_from_function(input_fn))``, for mode PER_WORKER only. A collective call."""
        if getattr(replication_mode, "name", "PER_WORKER") != "PER_WORKER":
            raise NotImplementedError(
                f"make_input_fn_iterator takes replication mode PER_WORKER, got {replication_mode}.\n"
                "    correct:    strategy.distribute_datasets_from_function(input_fn, "
                "mpistrat.InputOptions(experimental_replication_mode=…))"
            )
        return iter(self.distribute_datasets_from_function(input_fn))

    @_old("mpistrat.ArrayDataset(arrays, batch_size)")
    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None, *, batch_size: int) -> ArrayDataset:
        """Return ``ArrayDataset(numpy_input, batch_size)``; TensorFlow's has single rows, this one batches."""
        return ArrayDataset(numpy_input, batch_size)

    @_old("strategy.distribute_datasets_from_function(dataset_fn)")
    def experimental_distribute_datasets_from_function(
        self: Any, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> Any:
        """Return ``distribute_datasets_from_function(dataset_fn, options)``. A collective call."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    @_old("strategy.extended.colocate_vars_with(variable)")
    def colocate_vars_with(self: Any, colocate_with_variable: Any) -> Any:
        """Return ``extended.colocate_vars_with(variable)``."""
        return self.extended.colocate_vars_with(colocate_with_variable)
