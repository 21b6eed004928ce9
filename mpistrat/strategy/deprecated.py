"""What TensorFlow has deprecated: old names that warn and do what the present one does, and options without effect here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.inputs.sources import ArrayDataset
from mpistrat.reduction import ReduceOp

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)


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


def merge_hints(options: CommunicationOptions | None, hints: CommunicationOptions) -> CommunicationOptions:
    """Return `options` merged over `experimental_hints`, their old name, which warns."""
    warnings.warn("experimental_hints= is deprecated; use options=", DeprecationWarning, stacklevel=3)
    return hints.merge(options)


def accepts_hints(method: _Method) -> _Method:
    """Let a method with `options` take them as `experimental_hints` too."""

    @wraps(method)
    def merging(*args: Any, experimental_hints: CommunicationOptions | None = None, **kwargs: Any) -> Any:
        if experimental_hints is None:
            return method(*args, **kwargs)
        given = signature(method).bind(*args, **kwargs)
        given.arguments["options"] = merge_hints(given.arguments.get("options"), experimental_hints)
        return method(*given.args, **given.kwargs)

    return merging  # type: ignore[return-value]


def _configure(
    self: Any, session_config: Any = None, cluster_spec: Any = None, task_type: str | None = None, task_id: int | None = None
) -> None:
    if (cluster_spec, task_type, task_id) != (None, None, None):
        raise NotImplementedError(
            f"a strategy cannot be moved to another cluster: got cluster_spec={cluster_spec!r}, task_type={task_type!r}, "
            f"task_id={task_id!r}.\n"
            "    incorrect:  strategy.configure(cluster_spec=spec, task_type=kind, task_id=index)\n"
            "    correct:    mpistrat.MultiWorkerMirroredStrategy(cluster_resolver)"
        )


def _make_input_fn_iterator(self: Any, input_fn: Callable[..., Any], replication_mode: Any = None) -> Any:
    if getattr(replication_mode, "name", "PER_WORKER") != "PER_WORKER":
        raise NotImplementedError(
            f"make_input_fn_iterator takes replication mode PER_WORKER, got {replication_mode}.\n"
            "    correct:    strategy.distribute_datasets_from_function(input_fn, "
            "mpistrat.InputOptions(experimental_replication_mode=…))"
        )
    return iter(self.distribute_datasets_from_function(input_fn))


# of each old method of a strategy: what to use, and what it does
_OLD_NAMES: dict[str, tuple[str, Callable[..., Any]]] = {
    "unwrap": ("strategy.experimental_local_results(value)", lambda self, value: self.experimental_local_results(value)),
    "group": ("the value itself", lambda self, value, name=None: None),
    "configure": ("MultiWorkerMirroredStrategy(cluster_resolver)", _configure),
    "update_config_proto": ("CommunicationOptions", lambda self, config_proto: config_proto),
    "experimental_run": (
        "strategy.run(fn, args=(next(iterator),))",
        lambda self, fn, input_iterator=None: self.run(fn, () if input_iterator is None else (next(input_iterator),)),
    ),
    "make_dataset_iterator": (
        "iter(strategy.experimental_distribute_dataset(dataset))",
        lambda self, dataset: iter(self.experimental_distribute_dataset(dataset)),
    ),
    "make_input_fn_iterator": ("iter(strategy.distribute_datasets_from_function(input_fn))", _make_input_fn_iterator),
    "experimental_make_numpy_dataset": (
        "mpistrat.ArrayDataset(arrays, batch_size)",
        lambda self, numpy_input, session=None, *, batch_size: ArrayDataset(numpy_input, batch_size),
    ),
    "experimental_distribute_datasets_from_function": (
        "strategy.distribute_datasets_from_function(dataset_fn)",
        lambda self, dataset_fn, options=None: self.distribute_datasets_from_function(dataset_fn, options),
    ),
    "colocate_vars_with": (
        "strategy.extended.colocate_vars_with(variable)",
        lambda self, colocate_with_variable: self.extended.colocate_vars_with(colocate_with_variable),
    ),
}


def with_old_names(kind: _Class) -> _Class:
    """Give a class of strategies the methods of the table."""
    for name, (present, method) in _OLD_NAMES.items():
        setattr(kind, name, _warning(name, present, method))
    return kind


def _warning(name: str, present: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def warning(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"strategy.{name} is deprecated; use {present}", DeprecationWarning, stacklevel=2)
        return method(*args, **kwargs)

    warning.__name__, warning.__doc__ = name, f"Deprecated in TensorFlow; use {present}."
    return warning
