"""The tf.distribute programming model for NumPy and CuPy arrays on MPI.

File law: importing the package starts neither MPI nor CUDA and reads no environment; a public name is imported from its
home when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpistrat import errors as errors
    from mpistrat import experimental as experimental
    from mpistrat.context.values import DistributedValues as DistributedValues
    from mpistrat.inputs.dataset import ArrayDataset as ArrayDataset
    from mpistrat.inputs.distribute import DistributedDataset as DistributedDataset
    from mpistrat.inputs.input_context import InputContext as InputContext
    from mpistrat.reduction import ReduceOp as ReduceOp
    from mpistrat.state.variables import Variable as Variable
    from mpistrat.state.variables import VariableAggregation as VariableAggregation
    from mpistrat.state.variables import VariableSynchronization as VariableSynchronization
    from mpistrat.strategy import experimental_set_strategy as experimental_set_strategy
    from mpistrat.strategy import get_replica_context as get_replica_context
    from mpistrat.strategy import get_strategy as get_strategy
    from mpistrat.strategy import has_strategy as has_strategy
    from mpistrat.strategy import in_cross_replica_context as in_cross_replica_context
    from mpistrat.strategy.base import Strategy as Strategy
    from mpistrat.strategy.extended import StrategyExtended as StrategyExtended
    from mpistrat.strategy.mirrored import MirroredStrategy as MirroredStrategy
    from mpistrat.strategy.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from mpistrat.strategy.one_device import OneDeviceStrategy as OneDeviceStrategy
    from mpistrat.strategy.replica_context import ReplicaContext as ReplicaContext

_HOMES = {
    "ArrayDataset": "mpistrat.inputs.dataset",
    "DistributedDataset": "mpistrat.inputs.distribute",
    "DistributedValues": "mpistrat.context.values",
    "InputContext": "mpistrat.inputs.input_context",
    "MirroredStrategy": "mpistrat.strategy.mirrored",
    "MultiWorkerMirroredStrategy": "mpistrat.strategy.multi_worker",
    "OneDeviceStrategy": "mpistrat.strategy.one_device",
    "ReduceOp": "mpistrat.reduction",
    "ReplicaContext": "mpistrat.strategy.replica_context",
    "Strategy": "mpistrat.strategy.base",
    "StrategyExtended": "mpistrat.strategy.extended",
    "Variable": "mpistrat.state.variables",
    "VariableAggregation": "mpistrat.state.variables",
    "VariableSynchronization": "mpistrat.state.variables",
    "experimental_set_strategy": "mpistrat.strategy",
    "get_replica_context": "mpistrat.strategy",
    "get_strategy": "mpistrat.strategy",
    "has_strategy": "mpistrat.strategy",
    "in_cross_replica_context": "mpistrat.strategy",
}
_MODULES = ("errors", "experimental")

__all__ = sorted([*_HOMES, *_MODULES])  # noqa: PLE0605 - a list, computed so that no name is written twice
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"mpistrat.{name}")
    else:
        raise AttributeError(f"module 'mpistrat' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
