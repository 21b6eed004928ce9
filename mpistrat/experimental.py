"""TensorFlow's spellings of names that it calls experimental."""

from mpistrat.communicator.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from mpistrat.context.input_context import ValueContext
from mpistrat.strategy.central_storage import CentralStorageStrategy
from mpistrat.strategy.multi_worker import ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ValueContext",
]

# the name that TensorFlow gave it first
CollectiveCommunication = CommunicationImplementation
