"""TensorFlow's ``tf.distribute.experimental``.

The module of a name is imported when the name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpistrat.lazy import publish

if TYPE_CHECKING:
    from mpistrat.checkpoint.preemption import PreemptionCheckpointHandler as PreemptionCheckpointHandler
    from mpistrat.checkpoint.preemption import TerminationConfig as TerminationConfig
    from mpistrat.communicator.options import CollectiveHints as CollectiveHints
    from mpistrat.communicator.options import CommunicationImplementation as CollectiveCommunication  # noqa: F401
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
    from mpistrat.strategy.mirrored import CentralStorageStrategy as CentralStorageStrategy
    from mpistrat.strategy.mirrored import ExperimentalMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy  # noqa: F401

publish(__name__)
