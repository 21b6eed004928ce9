"""MirroredStrategy: synchronous replicas on the ranks of one node."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.communicator.meeting import time_to_meet
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.cross_device.ops import CrossDeviceOps
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.make_communicator import call_text, check_communication, make_communicator
from mpistrat.strategy.one_node import check_devices, check_one_node, node_devices, node_hierarchy, node_world
from mpistrat.strategy.strategy import Strategy

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """Keeps a copy of each variable on every rank of this node, all equal.

    Making one is a collective call of all ranks of the job.

    Parameters
    ----------
    devices : list of str, optional
        The device of each rank of the node, in rank order: ``["rank:0", "rank:1"]``, or ``["/cpu:0"]`` (on a GPU
        ``["/gpu:0"]``) where there is one rank. A replica runs on each rank, so the list can leave none out; it is there to
        check what was launched.
    cross_device_ops : CrossDeviceOps, optional
        How values are combined; `HierarchicalAllReduce` by default.
    communication_options : CommunicationOptions, optional
        How to communicate where a call does not say.
    num_packs : int, optional
        Cut the elements of a batch into so many equal packs; 0 reduces each array by itself. None (the default) packs by
        the options' `bytes_per_pack`. Not beside `cross_device_ops`, which have their own.
    allow_multiple_nodes : bool
        Where the job spans several nodes, train one model per node, none knowing of the others; each counts its ranks
        from 0.

    Raises
    ------
    LaunchError
        On every rank, if the job spans several nodes and that was not allowed.
    InvalidArgumentError
        If `devices` names something else than the ranks of this node, the options are not CommunicationOptions, or
        `num_packs` is negative or passed beside `cross_device_ops`.
    TypeError
        If `devices` is not a list, or `cross_device_ops` not a CrossDeviceOps.
    AgreementError
        If ranks passed different arguments, and on the others where one rank is refused.
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
        with rendezvous("MirroredStrategy", time_to_meet(communication_options)) as job:

            def check() -> None:
                if not allow_multiple_nodes:
                    check_one_node("MirroredStrategy", job.world, "launch on one node, or pass allow_multiple_nodes=True")
                check_devices("devices", devices, node_world(job))
                check_communication(cross_device_ops, communication_options, num_packs)

            job.agree(call, check)
            hierarchy = node_hierarchy(job)
        communicator = make_communicator(hierarchy, communication_options, num_packs)
        super().__init__(StrategyExtended(communicator, cross_device_ops, node_devices(hierarchy.world)))
