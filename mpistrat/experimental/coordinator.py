"""TensorFlow's ``tf.distribute.experimental.coordinator``."""

from mpistrat.parameter_server.coordinator import ClusterCoordinator, PerWorkerDataset, PerWorkerIterator, PerWorkerValues
from mpistrat.parameter_server.dispatcher import RemoteValue, RemoteValueStatus

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerIterator", "PerWorkerValues", "RemoteValue", "RemoteValueStatus"]
