"""TensorFlow's ``tf.distribute.experimental``."""

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

# its former name in TensorFlow
CollectiveCommunication = CommunicationImplementation
