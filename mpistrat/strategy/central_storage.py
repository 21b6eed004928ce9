"""CentralStorageStrategy: replicas on the ranks of one node, with the variables on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.context.stack import in_replica_context_of
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.cross_device.pairs import OnSomeReplicas
from mpistrat.cross_device.to_one_device import ReductionToOneDevice
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.mirrored import call_text, check_devices, check_one_node, node_devices, node_hierarchy
from mpistrat.strategy.strategy import Strategy
from mpistrat.structures import flatten, map_leaves
from mpistrat.topology.devices import device_name, ranks_of


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
        call = call_text("CentralStorageStrategy", compute_devices=compute_devices, parameter_device=parameter_device)
        with rendezvous("CentralStorageStrategy") as job:

            def check() -> int:
                check_one_node("CentralStorageStrategy", job.world, "launch on one node")
                check_devices("compute_devices", compute_devices, job.world)
                return 0 if parameter_device is None else ranks_of(parameter_device, job.world)[0]

            root = job.agree(call, check)
            hierarchy = node_hierarchy(job)
        communicator = Communicator(hierarchy)
        super().__init__(CentralStorageExtended(communicator, root))


class CentralStorageExtended(StrategyExtended):
    """The extended part of `CentralStorageStrategy`: the change of a variable is computed on the rank `root` and broadcast."""

    def __init__(self, communicator: BaseCommunicator, root: int) -> None:
        super().__init__(
            communicator, ReductionToOneDevice(root), node_devices(communicator.world), parameter_devices=(device_name(root),)
        )
        self.root = root

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(variable, *args, **kwargs)``, and broadcast the variable of the root. A collective call.

        As `StrategyExtended.update`, but arguments may be values that were reduced to the variable, and have one component: the
        variable has only one.
        """
        if not in_replica_context_of(self._strategy, "strategy.extended.update"):
            given = tuple(args), dict(kwargs or {})
            with self.communicator.refusing("extended.update"):
                self._check_single(flatten(given)[0])
            args, kwargs = map_leaves(self._shared, given)
        return super().update(var, fn, args, kwargs, group)

    def _check_single(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            mirrored = isinstance(leaf, Mirrored) and not self.variable_created_in_scope(leaf)
            if isinstance(leaf, PerReplica) or (mirrored and self.communicator.size > 1):
                raise InvalidArgumentError(
                    f"extended.update got {leaf!r}, which has {self.communicator.size} components; the variable has one: "
                    "reduce the value to it.\n"
                    "    incorrect:  extended.update(variable, fn, args=(strategy.run(gradient),))\n"
                    '    correct:    total = extended.reduce_to("sum", strategy.run(gradient), variable); '
                    "extended.update(variable, fn, args=(total,))"
                )

    def _shared(self, leaf: Any) -> Any:
        """Return a value that only some ranks have as one that all ranks have, because all ranks call the function."""
        return super().broadcast_to(leaf, set(self.worker_devices)) if isinstance(leaf, OnSomeReplicas) else leaf
