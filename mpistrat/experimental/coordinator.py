"""TensorFlow's ``tf.distribute.experimental.coordinator``."""

from mpistrat.parameter_server.coordination import ClusterCoordinator, PerWorkerDataset, PerWorkerIterator
from mpistrat.parameter_server.remote_value import PerWorkerValues, RemoteValue, RemoteValueStatus

__all__ = ["ClusterCoordinator", "PerWorkerDataset", "PerWorkerIterator", "PerWorkerValues", "RemoteValue", "RemoteValueStatus"]
