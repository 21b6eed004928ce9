"""MultiWorkerMirroredStrategy: synchronous replicas on all ranks of the job."""

from __future__ import annotations

import os
import warnings

import numpy as np

from mpistrat.arrays import Array
from mpistrat.cluster.mpi_resolver import MPIClusterResolver
from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.tf_config import TFConfigClusterResolver
from mpistrat.cluster.training import chief_rank, training_role
from mpistrat.communicator.construction import rendezvous_seconds
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationImplementation, CommunicationOptions
from mpistrat.errors import CollectiveError, DeadlineExceededError, InvalidArgumentError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.groups.rendezvous import Rendezvous, rendezvous
from mpistrat.reduction import ReduceOp
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.make_communicator import call_text, check_communication, make_communicator
from mpistrat.strategy.strategy import Strategy
from mpistrat.topology.devices import device_name

__all__ = ["ExperimentalMultiWorkerMirroredStrategy", "MultiWorkerExtended", "MultiWorkerMirroredStrategy"]


class MultiWorkerMirroredStrategy(Strategy):
    """Keeps a copy of each variable on every rank of the job; the copies stay equal. Reduces inside nodes, then between them.

    Creating one is a collective call of all ranks of the job.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        Defines which rank is the chief, which writes checkpoints and logs; the ranks themselves are known from MPI. By default
        a TFConfigClusterResolver if ``TF_CONFIG`` is set, else a MPIClusterResolver. With an empty cluster rank 0 is the chief.
    communication_options : CommunicationOptions, optional
        Defaults of every call.
    num_packs : int, optional
        Number of equal packs that the elements of a batch are cut into; 0: each array is reduced separately. None (the
        default): packs follow `bytes_per_pack` of the options.

    Raises
    ------
    InvalidArgumentError
        If `cluster_resolver` is not a ClusterResolver, or does not define the task of this rank, or defines one that does not
        train; if ``TF_CONFIG`` is invalid; if the options are not CommunicationOptions; or if `num_packs` is negative.
    LaunchError
        On every rank, if no rank plays a training task of the cluster.
    AgreementError
        If ranks passed different arguments or read different clusters, or if another rank raised one of these errors.
    DeadlineExceededError
        If the options have a deadline, and not all ranks make this call in time.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        num_packs: int | None = None,
    ) -> None:
        call = call_text(
            "MultiWorkerMirroredStrategy",
            cluster_resolver=_kind(cluster_resolver),
            communication_options=communication_options,
            num_packs=num_packs,
        )

        def check() -> ClusterResolver | None:
            _check_resolver(cluster_resolver)
            check_communication(None, communication_options, num_packs)
            reads_variable = cluster_resolver is None and _default_kind() is TFConfigClusterResolver
            return TFConfigClusterResolver() if reads_variable else cluster_resolver

        with rendezvous("MultiWorkerMirroredStrategy", rendezvous_seconds(communication_options)) as job:
            found = job.agree(call, check)
            self._cluster_resolver = MPIClusterResolver() if found is None else found
            chief = _chief(job, self._cluster_resolver)
            hierarchy = Hierarchy(job.comm, job.world)
        communicator = make_communicator(hierarchy, communication_options, num_packs)
        _check_health(communicator)
        super().__init__(MultiWorkerExtended(communicator, is_chief=communicator.rank == chief))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Defines the task of each rank."""
        return self._cluster_resolver


class _DeprecatedNameMeta(type):
    """Makes every multi-worker strategy an instance of the deprecated name, as in TensorFlow: libraries check for it."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls is ExperimentalMultiWorkerMirroredStrategy:
            return isinstance(instance, MultiWorkerMirroredStrategy)
        return super().__instancecheck__(instance)


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy, metaclass=_DeprecatedNameMeta):
    """TensorFlow's deprecated ``experimental.MultiWorkerMirroredStrategy``; use `MultiWorkerMirroredStrategy`.

    Creating one is a collective call of all ranks of the job. Every `MultiWorkerMirroredStrategy` is an instance of this class.

    Parameters
    ----------
    communication : CommunicationImplementation or str
        AUTO, RING or NCCL.
    cluster_resolver : ClusterResolver, optional
        As for `MultiWorkerMirroredStrategy`, as are the errors.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        warnings.warn(
            "mpistrat.experimental.MultiWorkerMirroredStrategy is deprecated; use mpistrat.MultiWorkerMirroredStrategy("
            "communication_options=mpistrat.experimental.CommunicationOptions(implementation=…))",
            DeprecationWarning,
            stacklevel=2,
        )
        name = "experimental.MultiWorkerMirroredStrategy"
        with rendezvous(name) as job:
            call = call_text(name, communication=communication)
            options = job.agree(call, lambda: CommunicationOptions(implementation=communication))
        super().__init__(cluster_resolver, options)


class MultiWorkerExtended(StrategyExtended):
    """The extended part of `MultiWorkerMirroredStrategy`.

    Parameters
    ----------
    communicator : BaseCommunicator
        Over all ranks.
    is_chief : bool
        Whether this rank is the chief, which writes checkpoints and logs.
    """

    def __init__(self, communicator: BaseCommunicator, *, is_chief: bool) -> None:
        super().__init__(communicator, worker_devices=(device_name(communicator.rank),))
        self._is_chief = is_chief

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints: True on the chief."""
        return self._is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank writes logs: True on the chief."""
        return self._is_chief


def _default_kind() -> type[TFConfigClusterResolver | MPIClusterResolver]:
    return TFConfigClusterResolver if os.environ.get("TF_CONFIG", "").strip() else MPIClusterResolver


def _kind(resolver: object) -> type:
    return _default_kind() if resolver is None else type(resolver)


def _check_resolver(resolver: object) -> None:
    if not isinstance(resolver, (ClusterResolver, type(None))):
        raise InvalidArgumentError(
            f"cluster_resolver must be a ClusterResolver or None; got {type(resolver).__name__}.\n"
            "    incorrect:  mpistrat.MultiWorkerMirroredStrategy(options)\n"
            "    correct:    mpistrat.MultiWorkerMirroredStrategy(communication_options=options)"
        )


def _chief(job: Rendezvous, resolver: ClusterResolver) -> int:
    """Return the rank of the chief, after checking that all ranks have read the same cluster. A collective call."""
    role = job.agree("reading the cluster resolver", lambda: training_role(resolver))
    job.agree(f"{role.spec!r}, read from the cluster resolver", lambda: None)
    return chief_rank(job.comm.allgather(role))


def _check_health(communicator: BaseCommunicator) -> None:
    """Reduce one number over all ranks, to detect problems before the first step. A collective call."""
    ones: list[Array] = [np.ones(1, np.int64)]
    try:
        [total] = communicator.all_reduce(ReduceOp.SUM, ones)
    except DeadlineExceededError:
        raise  # ranks are missing, so `close`, a collective call, would wait for them
    except Exception:
        communicator.close()
        raise
    if total != communicator.size:
        raise CollectiveError(
            f"the first all-reduce is wrong: {communicator.size} ranks contributed 1 each, and the result is {int(total[0])}"
        )
