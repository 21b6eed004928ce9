"""TensorFlow's ``tf.distribute.cluster_resolver``: the tasks of a cluster, and the task of this process."""

from mpistrat.cluster.mpi_resolver import MPIClusterResolver
from mpistrat.cluster.resolver import ClusterResolver, SimpleClusterResolver, TFConfigClusterResolver, UnionResolver
from mpistrat.cluster.slurm import SlurmClusterResolver

__all__ = [
    "ClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
