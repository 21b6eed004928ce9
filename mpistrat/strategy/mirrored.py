"""MirroredStrategy: synchronous replicas on the ranks of one node."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.communicator.construction import rendezvous_seconds
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.cross_device.ops import CrossDeviceOps
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.make_communicator import call_text, check_communication, make_communicator
from mpistrat.strategy.one_node import check_devices, check_one_node, node_devices, node_hierarchy, node_world
from mpistrat.strategy.strategy import Strategy

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """Keeps a copy of each variable on every rank of this node; the copies stay equal.

    Creating one is a collective call of all ranks of the job.

    Parameters
    ----------
    devices : list of str, optional
        The device of each rank of the node, in rank order: ``["rank:0", "rank:1"]``; with a single rank also ``["/cpu:0"]`` or
        ``["/gpu:0"]``. A replica runs on every rank, so the list must name all of them; it only checks how the job was
        launched.
    cross_device_ops : CrossDeviceOps, optional
        Reduces values; `HierarchicalAllReduce` by default.
    communication_options : CommunicationOptions, optional
        Defaults of every call.
    num_packs : int, optional
        Number of equal packs that the elements of a batch are cut into; 0: each array is reduced separately. None (the
        default): packs follow `bytes_per_pack` of the options. Not together with `cross_device_ops`, which have their own.
    allow_multiple_nodes : bool
        In a job on several nodes, train an independent model on each node; ranks are counted from 0 on each of them.

    Raises
    ------
    LaunchError
        On every rank, if the job spans several nodes and `allow_multiple_nodes` is False.
    InvalidArgumentError
        If `devices` are not the devices of the ranks of this node, the options are not CommunicationOptions, or `num_packs` is
        negative or passed together with `cross_device_ops`.
    TypeError
        If `devices` is not a list, or `cross_device_ops` not a CrossDeviceOps.
    AgreementError
        If ranks passed different arguments, or if another rank raised one of these errors.
    DeadlineExceededError
        If the options have a deadline, and not all ranks make this call in time.
    """

    _accepts_per_replica = True

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        num_packs: int | None = None,
        allow_multiple_nodes: bool = False,
    ) -> None:
        call = call_text(
            "MirroredStrategy",
            devices=devices,
            cross_device_ops=cross_device_ops,
            communication_options=communication_options,
            num_packs=num_packs,
            allow_multiple_nodes=allow_multiple_nodes,
        )
        with rendezvous("MirroredStrategy", rendezvous_seconds(communication_options)) as job:

            def check() -> None:
                if not allow_multiple_nodes:
                    check_one_node("MirroredStrategy", job.world, "launch on one node, or pass allow_multiple_nodes=True")
                check_devices("devices", devices, node_world(job))
                check_communication(cross_device_ops, communication_options, num_packs)

            job.agree(call, check)
            hierarchy = node_hierarchy(job)
        communicator = make_communicator(hierarchy, communication_options, num_packs)
        super().__init__(StrategyExtended(communicator, cross_device_ops, node_devices(hierarchy.world)))
