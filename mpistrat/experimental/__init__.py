"""TensorFlow's ``tf.distribute.experimental``.

The module of a name is imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpistrat.communicator.options import CollectiveHints as CollectiveHints
    from mpistrat.communicator.options import CommunicationImplementation as CommunicationImplementation
    from mpistrat.communicator.options import CommunicationOptions as CommunicationOptions
    from mpistrat.experimental import coordinator as coordinator
    from mpistrat.experimental import partitioners as partitioners
    from mpistrat.inputs.input_options import ValueContext as ValueContext
    from mpistrat.parameter_server.strategy import ParameterServerStrategy as ParameterServerStrategy
    from mpistrat.parameter_server.variables import ServerVariable as ServerVariable
    from mpistrat.parameter_server.variables import ShardedVariable as ShardedVariable
    from mpistrat.parameter_server.variables import StoredVariable as StoredVariable
    from mpistrat.parameter_server.variables import embedding_lookup as embedding_lookup
    from mpistrat.strategy.central_storage import CentralStorageStrategy as CentralStorageStrategy
    from mpistrat.strategy.mirrored import ExperimentalMultiWorkerMirroredStrategy

    CollectiveCommunication = CommunicationImplementation
    MultiWorkerMirroredStrategy = ExperimentalMultiWorkerMirroredStrategy

_HOMES = {
    "CentralStorageStrategy": "mpistrat.strategy.central_storage",
    "CollectiveCommunication": "mpistrat.communicator.options",
    "CollectiveHints": "mpistrat.communicator.options",
    "CommunicationImplementation": "mpistrat.communicator.options",
    "CommunicationOptions": "mpistrat.communicator.options",
    "MultiWorkerMirroredStrategy": "mpistrat.strategy.mirrored",
    "ParameterServerStrategy": "mpistrat.parameter_server.strategy",
    "ServerVariable": "mpistrat.parameter_server.variables",
    "ShardedVariable": "mpistrat.parameter_server.variables",
    "StoredVariable": "mpistrat.parameter_server.variables",
    "ValueContext": "mpistrat.inputs.input_options",
    "embedding_lookup": "mpistrat.parameter_server.variables",
}
_NAMES_THERE = {
    "CollectiveCommunication": "CommunicationImplementation",  # its former name in TensorFlow
    "MultiWorkerMirroredStrategy": "ExperimentalMultiWorkerMirroredStrategy",
}
_MODULES = ("coordinator", "partitioners")

__all__ = sorted([*_HOMES, *_MODULES])  # noqa: PLE0605 - a list, computed so that no name is written twice


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        importlib.import_module("mpistrat.strategy")  # registers the default strategy, which any of them may need
        value = getattr(importlib.import_module(_HOMES[name]), _NAMES_THERE.get(name, name))
    elif name in _MODULES:
        value = importlib.import_module(f"mpistrat.experimental.{name}")
    else:
        raise AttributeError(f"module 'mpistrat.experimental' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
