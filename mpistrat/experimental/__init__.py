"""TensorFlow's ``tf.distribute.experimental``."""

from mpistrat.communicator.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpistrat.context.input_context import ValueContext
from mpistrat.experimental import coordinator, partitioners
from mpistrat.parameter_server.server_strategy import ParameterServerStrategy
from mpistrat.parameter_server.server_variable import ServerVariable, ShardedVariable, embedding_lookup
from mpistrat.parameter_server.stored_variable import StoredVariable
from mpistrat.strategy.central_storage import CentralStorageStrategy
from mpistrat.strategy.multi_worker import ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "ServerVariable",
    "ShardedVariable",
    "StoredVariable",
    "ValueContext",
    "coordinator",
    "embedding_lookup",
    "partitioners",
]

# its former name in TensorFlow
CollectiveCommunication = CommunicationImplementation
