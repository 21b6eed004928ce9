"""For strategies on one node: the world, groups and device names of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from mpistrat.device.binding import own_device
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.groups.rendezvous import Rendezvous
from mpistrat.text import format_count
from mpistrat.topology.devices import device_name, ranks_of
from mpistrat.topology.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["check_devices", "check_one_node", "node_devices", "node_hierarchy", "node_world"]


def check_one_node(strategy: str, world: World, otherwise: str) -> None:
    """Check that the job is on one node; `otherwise` is the error's advice.

    Raises
    ------
    LaunchError
        On every rank, if it is not.
    """
    if world.num_nodes == 1:
        return
    error = LaunchError(
        f"{strategy} trains on the ranks of one node, but this job has {world.size} ranks on {world.num_nodes} nodes "
        f"({', '.join(node.name for node in world.nodes)}), which would train {world.num_nodes} unrelated models. "
        f"Use MultiWorkerMirroredStrategy to train one model on all of them, or {otherwise}."
    )
    error.raised_everywhere = True
    raise error


def check_devices(argument: str, devices: Sequence[str] | None, world: World) -> None:
    """Check that a list of devices names each rank of a node once, in order. None is accepted.

    Raises
    ------
    TypeError
        If it is not None, a list or a tuple.
    InvalidArgumentError
        If it names something else, a rank twice, not all ranks, or another order.
    """
    if devices is None:
        return
    if not isinstance(devices, (list, tuple)):
        raise TypeError(f"{argument} must be None or a list of device names, {_all_devices(world)!r} here; got {devices!r}")
    named = [ranks_of(device, world) for device in devices]
    problem = _problem(devices, named, world)
    if problem:
        raise InvalidArgumentError(
            f"{argument}={list(devices)!r} {problem}. This node has {format_count(world.size, 'rank')}, and a "
            f"replica runs on each: pass {argument}=None or {_all_devices(world)!r}, or launch another number of ranks"
        )


def node_world(rendezvous: Rendezvous) -> World:
    """Return the world that consists of this rank's node only, with ranks from 0."""
    node = rendezvous.world.nodes[rendezvous.world.place(rendezvous.rank).node_index]
    return World.from_node_of_rank([0] * len(node.ranks), [node.name] * len(node.ranks))


def node_hierarchy(rendezvous: Rendezvous) -> Hierarchy:
    """Return the groups of this rank's node. A collective call of all ranks of the job."""
    node_comm = cast(
        "MPI.Intracomm", rendezvous.comm.Split(rendezvous.world.place(rendezvous.rank).node_index, rendezvous.rank)
    )
    hierarchy = Hierarchy(node_comm, node_world(rendezvous))
    node_comm.Free()
    return hierarchy


def node_devices(world: World) -> tuple[str, ...]:
    """Return the full name of each rank's device."""
    return tuple(device_name(rank) for rank in range(world.size))


def _all_devices(world: World) -> list[str]:
    return [own_device()] if world.size == 1 else [f"rank:{rank}" for rank in range(world.size)]


def _problem(devices: Sequence[str], named: Sequence[tuple[int, ...]], world: World) -> str:
    """Return what is wrong with the devices, or an empty text."""
    for device, owners in zip(devices, named, strict=True):
        if len(owners) > 1:
            return f"is ambiguous: every rank has a device {device!r}"
    ranks = [owners[0] for owners in named]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    missing = sorted(set(range(world.size)) - set(ranks))
    if twice:
        return f"names rank {twice[0]} more than once"
    if missing:
        return f"leaves out {', '.join(f'rank {rank}' for rank in missing)}"
    return "" if ranks == sorted(ranks) else "is not in the order of ranks, which is that of replicas"
