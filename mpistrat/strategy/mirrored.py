"""Strategies of synchronous replicas: Mirrored and CentralStorage on one node, MultiWorkerMirrored on all ranks of the job."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from mpistrat.cluster_resolver import ClusterResolver, MPIClusterResolver, TFConfigClusterResolver, chief_rank, training_role
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationImplementation, CommunicationOptions, check_options, rendezvous_seconds
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.cross_device import CrossDeviceOps, OnSomeReplicas, ReductionToOneDevice
from mpistrat.device.binding import own_device
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.groups.rendezvous import Rendezvous, rendezvous
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.strategy import Strategy
from mpistrat.structures import flatten, map_leaves
from mpistrat.text import format_count
from mpistrat.topology.world import World, device_name, ranks_of

T = TypeVar("T")


class MirroredStrategy(Strategy):
    """Keeps a copy of each variable on every rank of this node; the copies stay equal.

    Creating one is a collective call of all ranks of the job, which must be on one node. If one of them is refused, or their
    arguments differ, all raise.

    Parameters
    ----------
    devices : list of str, optional
        The device of each rank of the node, in rank order: ``["rank:0", "rank:1"]``; with a single rank also ``["/cpu:0"]`` or
        ``["/gpu:0"]``. A replica runs on every rank, so the list only checks how the job was launched.
    cross_device_ops : CrossDeviceOps, optional
        Reduces values; `HierarchicalAllReduce` by default.
    communication_options : CommunicationOptions, optional
        Defaults of every call.
    """

    _accepts_per_replica = True

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        def check(job: Rendezvous) -> None:
            _check_one_node("MirroredStrategy", job.world)
            _check_devices("devices", devices, job.world)
            _check_communication(cross_device_ops, communication_options)

        with _rendezvous(
            "MirroredStrategy",
            check,
            devices=devices,
            cross_device_ops=cross_device_ops,
            communication_options=communication_options,
        ) as (job, _):
            hierarchy = Hierarchy(job.comm, job.world)
        communicator = Communicator(hierarchy, communication_options)
        super().__init__(StrategyExtended(communicator, cross_device_ops, tuple(map(device_name, range(communicator.size)))))


class MultiWorkerMirroredStrategy(Strategy):
    """Keeps a copy of each variable on every rank of the job; the copies stay equal. Reduces inside nodes, then between them.

    Creating one is a collective call of all ranks of the job. If one of them is refused, or their arguments differ, all raise.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        Defines which rank is the chief, which writes checkpoints and logs; the ranks themselves are known from MPI. By default
        a TFConfigClusterResolver if ``TF_CONFIG`` is set, else a MPIClusterResolver. With an empty cluster rank 0 is the chief.
    communication_options : CommunicationOptions, optional
        Defaults of every call.
    """

    def __init__(
        self, cluster_resolver: ClusterResolver | None = None, communication_options: CommunicationOptions | None = None
    ) -> None:
        def check(_: Rendezvous) -> ClusterResolver | None:
            if not isinstance(cluster_resolver, (ClusterResolver, type(None))):
                raise InvalidArgumentError(
                    f"cluster_resolver must be a ClusterResolver or None; got {type(cluster_resolver).__name__}.\n"
                    "    incorrect:  mpistrat.MultiWorkerMirroredStrategy(options)\n"
                    "    correct:    mpistrat.MultiWorkerMirroredStrategy(communication_options=options)"
                )
            _check_communication(None, communication_options)
            reads_variable = cluster_resolver is None and _default_kind() is TFConfigClusterResolver
            return TFConfigClusterResolver() if reads_variable else cluster_resolver

        with _rendezvous(
            "MultiWorkerMirroredStrategy",
            check,
            cluster_resolver=_default_kind() if cluster_resolver is None else type(cluster_resolver),
            communication_options=communication_options,
        ) as (job, found):
            self._cluster_resolver = MPIClusterResolver() if found is None else found
            chief = _chief(job, self._cluster_resolver)
            hierarchy = Hierarchy(job.comm, job.world)
        communicator = Communicator(hierarchy, communication_options)
        devices = (device_name(communicator.rank),)
        super().__init__(StrategyExtended(communicator, worker_devices=devices, is_chief=communicator.rank == chief))


class _OldName(type):
    """Makes every multi-worker strategy an instance of the deprecated name, as in TensorFlow: libraries check for it."""

    def __instancecheck__(cls, instance: object) -> bool:
        wanted = MultiWorkerMirroredStrategy if cls is ExperimentalMultiWorkerMirroredStrategy else cls
        return type.__instancecheck__(wanted, instance)


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy, metaclass=_OldName):
    """TensorFlow's deprecated ``experimental.MultiWorkerMirroredStrategy``; use `MultiWorkerMirroredStrategy`.

    Every `MultiWorkerMirroredStrategy` is an instance of this class, whose `communication` is AUTO, RING or NCCL.
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

        def check(_: Rendezvous) -> CommunicationOptions:
            return CommunicationOptions(implementation=communication)

        with _rendezvous("experimental.MultiWorkerMirroredStrategy", check, communication=communication) as (_, options):
            pass
        super().__init__(cluster_resolver, options)


class CentralStorageStrategy(Strategy):
    """Keeps the variables on one rank of a node; every rank of the node runs a replica.

    Creating one is a collective call of all ranks of the job, which must be on one node. If one is refused, all raise.

    Every rank has a read-only copy of each variable, so reading it communicates nothing. Every change of a variable is a
    collective call: in ``strategy.run`` the values of the replicas are aggregated first; all ranks compute the change, and the
    result of the rank that keeps the variable is broadcast.

    Parameters
    ----------
    compute_devices : list of str, optional
        The device of each rank of the node, in rank order, as for `MirroredStrategy`.
    parameter_device : str, optional
        The rank that keeps the variables, for example ``rank:1``; by default rank 0.
    """

    def __init__(self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None) -> None:
        def check(job: Rendezvous) -> int:
            _check_one_node("CentralStorageStrategy", job.world)
            _check_devices("compute_devices", compute_devices, job.world)
            return 0 if parameter_device is None else ranks_of(parameter_device, job.world)[0]

        arguments = {"compute_devices": compute_devices, "parameter_device": parameter_device}
        with _rendezvous("CentralStorageStrategy", check, **arguments) as (job, root):
            hierarchy = Hierarchy(job.comm, job.world)
        communicator = Communicator(hierarchy)
        super().__init__(CentralStorageExtended(communicator, root))


class CentralStorageExtended(StrategyExtended):
    """The extended part of `CentralStorageStrategy`: the change of a variable is computed on the rank `root` and broadcast."""

    def __init__(self, communicator: BaseCommunicator, root: int) -> None:
        devices = tuple(map(device_name, range(communicator.size)))
        super().__init__(communicator, ReductionToOneDevice(root), devices, parameter_devices=(device_name(root),))
        self.root = root

    def _arguments_of_update(self, given: Any) -> Any:
        """Return arguments of `update`, with what was reduced to the variable as a value of all ranks. A collective call."""
        with self.communicator.refusing("extended.update"):
            for leaf in flatten(given)[0]:
                mirrored = isinstance(leaf, Mirrored) and not self.variable_created_in_scope(leaf)
                if isinstance(leaf, PerReplica) or (mirrored and self.communicator.size > 1):
                    raise InvalidArgumentError(
                        f"extended.update got {leaf!r}, which has {self.communicator.size} components; the variable has one: "
                        "reduce the value to it.\n"
                        "    incorrect:  extended.update(variable, fn, args=(strategy.run(gradient),))\n"
                        '    correct:    total = extended.reduce_to("sum", strategy.run(gradient), variable); '
                        "extended.update(variable, fn, args=(total,))"
                    )
        everywhere = set(self.worker_devices)
        return map_leaves(lambda leaf: self.broadcast_to(leaf, everywhere) if isinstance(leaf, OnSomeReplicas) else leaf, given)


@contextmanager
def _rendezvous(strategy: str, check: Callable[[Rendezvous], T], **arguments: Any) -> Iterator[tuple[Rendezvous, T]]:
    """Wait for all ranks, compare the arguments of their strategies, and give what `check` returns, which raises on all."""
    text = ", ".join(f"{name}={_named(value)}" for name, value in arguments.items())
    with rendezvous(strategy, rendezvous_seconds(arguments.get("communication_options"))) as job:
        yield job, job.agree(f"{strategy}({text})", lambda: check(job))


def _default_kind() -> type[TFConfigClusterResolver | MPIClusterResolver]:
    return TFConfigClusterResolver if os.environ.get("TF_CONFIG", "").strip() else MPIClusterResolver


def _chief(job: Rendezvous, resolver: ClusterResolver) -> int:
    """Return the rank of the chief, after checking that all ranks have read the same cluster. A collective call."""
    spec, task = job.agree("reading the cluster resolver", lambda: training_role(resolver))
    job.agree(f"{spec!r}, read from the cluster resolver", lambda: None)
    return chief_rank(spec, job.comm.allgather(task))


def _check_one_node(strategy: str, world: World) -> None:
    if world.num_nodes == 1:
        return
    error = LaunchError(
        f"{strategy} trains on the ranks of one node, but this job has {world.size} ranks on {world.num_nodes} nodes "
        f"({', '.join(node.name for node in world.nodes)}), which would train {world.num_nodes} unrelated models. "
        "Use MultiWorkerMirroredStrategy to train one model on all of them, or launch on one node."
    )
    error.raised_everywhere = True
    raise error


def _check_devices(argument: str, devices: Sequence[str] | None, world: World) -> None:
    """Check that a list of devices names each rank of a node once, in order. None is accepted."""
    if devices is None:
        return
    accepted = [own_device()] if world.size == 1 else [f"rank:{rank}" for rank in range(world.size)]
    if not isinstance(devices, (list, tuple)):
        raise TypeError(f"{argument} must be None or a list of device names, {accepted!r} here; got {devices!r}")
    if [ranks_of(device, world) for device in devices] != [(rank,) for rank in range(world.size)]:
        raise InvalidArgumentError(
            f"{argument}={list(devices)!r} must name each rank of this node once, in order. This node has "
            f"{format_count(world.size, 'rank')}, and a replica runs on each: pass {argument}=None or {accepted!r}, or launch "
            "another number of ranks"
        )


def _check_communication(cross_device_ops: object, options: object) -> None:
    """Check the arguments of a strategy that concern communication."""
    check_options(options, "communication_options")
    if not isinstance(cross_device_ops, (CrossDeviceOps, type(None))):
        example = "mpistrat.ReductionToOneDevice()"
        raise TypeError(f"cross_device_ops must be a CrossDeviceOps, such as {example}; got {cross_device_ops!r}")


def _named(value: object) -> str:
    """Return the text of an argument: its repr, or only its type if the repr is an address, which differs between ranks."""
    if isinstance(value, CrossDeviceOps):
        return f"{type(value).__name__}(num_packs={value.num_packs})"
    if isinstance(value, type):
        return value.__name__
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else repr(value)
