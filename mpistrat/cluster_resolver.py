"""TensorFlow's ``tf.distribute.cluster_resolver``: the tasks of a cluster, and the task of this process."""

from mpistrat.cluster.mpi_resolver import MPIClusterResolver, SlurmClusterResolver
from mpistrat.cluster.resolver import ClusterResolver, SimpleClusterResolver, TFConfigClusterResolver, UnionResolver

__all__ = [
    "ClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
