"""The tf.distribute programming model for NumPy and CuPy arrays on MPI.

Invariant: importing the package starts neither MPI nor CUDA and reads no environment variable. The module of a public name is
imported when the name is first used: the imports below are for type checkers, and the table of names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpistrat.lazy import publish

if TYPE_CHECKING:
    from mpistrat import cluster_resolver as cluster_resolver
    from mpistrat import errors as errors
    from mpistrat import experimental as experimental
    from mpistrat.checkpoint.checkpoint import Checkpoint as Checkpoint
    from mpistrat.checkpoint.checkpoint import CheckpointManager as CheckpointManager
    from mpistrat.checkpoint.checkpoint import PerRank as PerRank
    from mpistrat.cluster import ClusterSpec as ClusterSpec
    from mpistrat.communicator.communicator import Communicator as Communicator
    from mpistrat.communicator.explain import MemoryReport as MemoryReport
    from mpistrat.communicator.sparse import IndexedSlices as IndexedSlices
    from mpistrat.context.stack import experimental_set_strategy as experimental_set_strategy
    from mpistrat.context.stack import get_replica_context as get_replica_context
    from mpistrat.context.stack import get_strategy as get_strategy
    from mpistrat.context.stack import has_strategy as has_strategy
    from mpistrat.context.stack import in_cross_replica_context as in_cross_replica_context
    from mpistrat.context.values import DistributedValues as DistributedValues
    from mpistrat.context.values import Mirrored as Mirrored
    from mpistrat.context.values import PerReplica as PerReplica
    from mpistrat.cross_device import CollectiveAllReduce as CollectiveAllReduce
    from mpistrat.cross_device import CrossDeviceOps as CrossDeviceOps
    from mpistrat.cross_device import HierarchicalAllReduce as HierarchicalAllReduce
    from mpistrat.cross_device import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from mpistrat.cross_device import NcclAllReduce as NcclAllReduce
    from mpistrat.cross_device import ReductionToOneDevice as ReductionToOneDevice
    from mpistrat.inputs.distribute import DistributedDataset as DistributedDataset
    from mpistrat.inputs.distribute import DistributedIterator as DistributedIterator
    from mpistrat.inputs.distribute import OptionalElement as OptionalElement
    from mpistrat.inputs.input_options import SHARD_HINT as SHARD_HINT
    from mpistrat.inputs.input_options import AutoShardPolicy as AutoShardPolicy
    from mpistrat.inputs.input_options import InputContext as InputContext
    from mpistrat.inputs.input_options import InputOptions as InputOptions
    from mpistrat.inputs.input_options import InputReplicationMode as InputReplicationMode
    from mpistrat.inputs.rebatch import ArraySpec as ArraySpec
    from mpistrat.inputs.sources import ArrayDataset as ArrayDataset
    from mpistrat.inputs.sources import Dataset as Dataset
    from mpistrat.inputs.sources import FileDataset as FileDataset
    from mpistrat.inputs.sources import MapDataset as MapDataset
    from mpistrat.launch.abort import RESTART_EXIT_CODE as RESTART_EXIT_CODE
    from mpistrat.parameter_server.strategy import Server as Server
    from mpistrat.reduction import ReduceOp as ReduceOp
    from mpistrat.state.changes import VariableAggregation as VariableAggregation
    from mpistrat.state.changes import VariableSynchronization as VariableSynchronization
    from mpistrat.state.variables import Variable as Variable
    from mpistrat.strategy.deprecated import RunOptions as RunOptions
    from mpistrat.strategy.deprecated import get_loss_reduction as get_loss_reduction
    from mpistrat.strategy.extended import StrategyExtended as StrategyExtended
    from mpistrat.strategy.mirrored import MirroredStrategy as MirroredStrategy
    from mpistrat.strategy.mirrored import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from mpistrat.strategy.replica_context import ReplicaContext as ReplicaContext
    from mpistrat.strategy.strategy import OneDeviceStrategy as OneDeviceStrategy
    from mpistrat.strategy.strategy import Strategy as Strategy

publish(__name__)
__version__ = "0.1.0"
