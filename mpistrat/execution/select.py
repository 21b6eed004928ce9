"""Select the transports of a rank's groups: those that the settings name, or the first ones that can be used.

Invariant: all ranks of a group use the same transport. It is used only if every rank supports it; if one rank raises, all do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpistrat import settings
from mpistrat.device.abstract import Device
from mpistrat.device.binding import bound_device
from mpistrat.errors import TransportError
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.cuda_awareness import find_verdict
from mpistrat.logger import warn_once
from mpistrat.text import format_bytes
from mpistrat.transports.base import DeviceTransport, Transport
from mpistrat.transports.cuda_aware import CudaAwareTransport
from mpistrat.transports.cuda_ipc import CudaIpcTransport
from mpistrat.transports.mpi import MpiTransport
from mpistrat.transports.mpi_world import WorldTransport
from mpistrat.transports.nccl import NcclTransport
from mpistrat.transports.ring import MpiRingTransport
from mpistrat.transports.shared_memory import SharedMemoryTransport
from mpistrat.transports.staged import StagedTransport

T = TypeVar("T", bound=DeviceTransport)

TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport for transport in (MpiTransport, MpiRingTransport, SharedMemoryTransport)
}
DEVICE_TRANSPORTS: dict[str, type[DeviceTransport]] = {
    transport.name: transport for transport in (NcclTransport, CudaIpcTransport, StagedTransport)
}

_INTRA, _INTER = ("shared_memory", "mpi"), ("mpi_ring", "mpi")
_INTRA_ON_DEVICE, _ALONE_ON_DEVICE = ("nccl", "cuda_ipc", "staged"), ("cuda_ipc", "staged")
_TRIAL_BYTES = 4096


@dataclass
class Transports:
    """The transports of one rank's groups."""

    intra: Transport
    world: WorldTransport  # of host memory
    # of each rail of this rank: for large buffers, and for small ones; the same where a setting names it
    rails: Mapping[int, Transport]
    small_rails: Mapping[int, Transport]


@dataclass(kw_only=True)
class DeviceTransports(Transports):
    """The transports of device memory; the texts and answers are the same on all ranks, but for `why`."""

    intra: DeviceTransport
    world_by_host: StagedTransport
    intra_by_host: StagedTransport  # for values that `intra` does not combine
    rails: Mapping[int, DeviceTransport]
    path: str  # the selected transports, as text
    why: str  # why no faster ones were selected
    lacks_nccl: str  # which nodes of several ranks do not use NCCL, and why; empty if all do
    has_channels: bool  # whether several operations of a rail may be in flight
    everywhere: NcclTransport | None  # NCCL over all ranks: on one node that uses it, on several if it is asked for
    combine_halves: bool  # whether 16-bit floats can be combined in their own dtype inside all nodes

    def __str__(self) -> str:
        return f"{self.path} ({self.why})" if self.why else self.path


def host_transports(hierarchy: Hierarchy) -> Transports:
    """Return the transports of host memory. A collective call.

    All ranks raise if the settings name a transport that a group cannot use, or one of device memory for ranks on CPUs.
    """
    intra = _on_host(hierarchy, settings.INTRA_TRANSPORT)
    inter = _on_host(hierarchy, settings.INTER_TRANSPORT)
    [inside] = _on_all(hierarchy, [_make(intra, _INTRA, hierarchy.intra)])
    # each rank joins its rails in increasing order, so that they cannot deadlock
    made = [_make(inter, _INTER, rail) for rail in hierarchy.rails.values()]
    rails = dict(zip(hierarchy.rails, _on_all(hierarchy, [(inside, ""), *made])[1:], strict=True))
    small_rails = rails if inter != "auto" else {shard: MpiTransport(rail) for shard, rail in hierarchy.rails.items()}
    return Transports(inside, WorldTransport(hierarchy, inside.window), rails, small_rails)


def device_transports(hierarchy: Hierarchy, device: Device, host: Transports) -> DeviceTransports:
    """Return the transports of device memory. A collective call.

    All ranks raise if the settings name a transport that a node does not support, or say that MPI is CUDA-aware and it is not.
    """
    intra, refusals = _inside_node(hierarchy.intra, device)
    is_alone = hierarchy.intra.size == 1
    node = hierarchy.world.nodes[hierarchy.place.node_index].name
    answers = hierarchy.world_group.comm.allgather((node, intra.name if intra else "", is_alone, "; ".join(refusals)))
    refused = {name: text for name, taken, _, text in answers if not taken}
    if refused:
        listed = "; ".join(f"{name}: {text}" for name, text in refused.items())
        named = (name for name in settings.INTRA_TRANSPORT.choices if name in DEVICE_TRANSPORTS)
        accepted = ", ".join(("auto", *named, "mpi"))
        raise TransportError(
            f"{settings.INTRA_TRANSPORT.name}={hierarchy.settings[settings.INTRA_TRANSPORT]} cannot move memory of GPUs here: "
            f"{listed}. Accepted are {accepted}"
        )
    assert intra is not None, "a refusal on this node has raised on all ranks"
    taken = {name: transport for name, transport, alone, _ in answers if not alone}
    everywhere = _join_all(hierarchy, device, intra)
    rails, between = _device_rails(hierarchy, device, host.rails)
    if not between and taken and intra.one_shot_bytes is not None:
        between = f"one shot up to {format_bytes(intra.one_shot_bytes)} ({settings.ONE_SHOT_BYTES.name})"
    others = dict.fromkeys((n, kind, text) for n, kind, alone, text in answers if not alone and kind != NcclTransport.name)
    return DeviceTransports(
        intra=intra,
        world=host.world,
        world_by_host=StagedTransport(hierarchy.world_group, device, host.world),
        rails=rails,
        small_rails=rails,
        intra_by_host=StagedTransport(hierarchy.intra, device),
        path=_path(taken, between),
        why=next((text for _, _, _, text in answers if text), ""),
        lacks_nccl="; ".join(f"{name} uses {kind}{f' ({text})' if text else ''}" for name, kind, text in others),
        has_channels=all(rail.has_channels for rail in rails.values()),
        everywhere=everywhere,
        combine_halves=all(DEVICE_TRANSPORTS[kind].combines_halves for _, kind, _, _ in answers),
    )


def _join_all(hierarchy: Hierarchy, device: Device, intra: DeviceTransport) -> NcclTransport | None:
    """Return NCCL over all ranks: that of the node where there is one, and one of its own where a setting asks for it."""
    if hierarchy.world.num_nodes == 1:
        return intra if isinstance(intra, NcclTransport) else None
    if hierarchy.settings[settings.INTER_TRANSPORT] != NcclTransport.name:
        return None
    transport, reason = _try(NcclTransport, hierarchy.world_group, device)
    if transport is None:
        intra.abort(reason)
        raise _refused_between(reason)
    return transport


def nccl_rails(hierarchy: Hierarchy, device: Device, everywhere: NcclTransport) -> Mapping[int, NcclTransport]:
    """Return NCCL along each rail of this rank; all ranks raise if those of one rail cannot join. A collective call."""
    if hierarchy.world.num_shards == 1:
        return {0: everywhere}
    # each rank joins its rails in increasing order, so that they cannot deadlock
    found = {shard: _try(NcclTransport, rail, device) for shard, rail in hierarchy.rails.items()}
    reasons = hierarchy.world_group.comm.allgather(next(filter(None, (reason for _, reason in found.values())), ""))
    rails = {shard: transport for shard, (transport, _) in found.items() if transport is not None}
    if any(reasons):
        for rail in rails.values():
            rail.abort("another rail cannot be joined")
        raise _refused_between(next(filter(None, reasons)))
    return rails


def _refused_between(reason: str) -> TransportError:
    setting = settings.INTER_TRANSPORT
    return TransportError(
        f"{setting.name}=nccl cannot move memory of GPUs here: {reason}. Accepted are {_accepted_on_host(setting)}"
    )


def _device_rails(
    hierarchy: Hierarchy, device: Device, host: Mapping[int, Transport]
) -> tuple[Mapping[int, DeviceTransport], str]:
    """Return the transport of each rail for large buffers in GPU memory, and what is between nodes, as text.

    A collective call. All rails of a job use the same: MPI directly if it is CUDA-aware on all of them, else host memory. If it
    turns out not to be, rank 0 prints a warning, once; if MPISTRAT_MPI_GPU says that it is, or nothing is delivered, all ranks
    raise.
    """
    if not host:
        return {}, ""
    inter = hierarchy.settings[settings.INTER_TRANSPORT]
    rails, refusal = _cuda_aware(hierarchy, device)
    between = f"{CudaAwareTransport.name} between nodes"
    if not rails:
        rails = {shard: StagedTransport(hierarchy.rails[shard], device, rail) for shard, rail in host.items()}
        between = f"staged over {next(iter(host.values())).name} between nodes ({refusal})"
    if inter == NcclTransport.name:
        between = f"{inter} between nodes"
    elif inter == "auto" and hierarchy.all_agree(not NcclTransport.probe(hierarchy.world_group)):
        between += f"; auto does not take NCCL there, which nobody has measured: {settings.INTER_TRANSPORT.name}=nccl does"
    return rails, between


def _cuda_aware(hierarchy: Hierarchy, device: Device) -> tuple[Mapping[int, DeviceTransport], str]:
    """Return rails that pass GPU memory to MPI, or the reason why there are none."""
    inter = hierarchy.settings[settings.INTER_TRANSPORT]
    if inter != "auto":
        return {}, f"{settings.INTER_TRANSPORT.name}={inter}"
    comm = hierarchy.world_group.comm
    verdict = bcast_or_raise(comm, find_verdict)
    if not verdict.is_aware:
        if not verdict.is_setting:
            _warn_of_staging(hierarchy, verdict.reason)
        return {}, verdict.reason
    rails = {shard: CudaAwareTransport(rail, device) for shard, rail in hierarchy.rails.items()}
    wrong = failed = ""
    for rail in rails.values():  # each rank goes through its rails in increasing order, so that they cannot deadlock
        try:
            wrong = rail.first_exchange() or wrong
        except TransportError as error:
            failed = str(error)
    wrong, failed = (next(filter(None, texts), "") for texts in zip(*comm.allgather((wrong, failed)), strict=True))
    if failed:
        raise TransportError(failed)
    if not wrong:
        return rails, ""
    if verdict.is_setting:
        raise TransportError(f"{wrong}, and {verdict.reason} was set: unset it, or set it to off")
    _warn_of_staging(hierarchy, wrong)
    return {}, wrong


def _inside_node(group: Group, device: Device) -> tuple[DeviceTransport | None, list[str]]:
    """Return the transport of the ranks of a node, or None, and why the faster ones cannot be used."""
    wanted = group.settings[settings.INTRA_TRANSPORT]
    if wanted == "mpi":
        return StagedTransport(group, device, MpiTransport(group)), []
    if wanted in TRANSPORTS:
        return None, [f"{wanted} moves memory of the host"]
    order = _INTRA_ON_DEVICE if group.size > 1 else _ALONE_ON_DEVICE
    refusals: list[str] = []
    for name in order if wanted == "auto" else (wanted,):
        transport, reason = _try(DEVICE_TRANSPORTS[name], group, device)
        if transport is not None:
            return transport, refusals
        refusals.append(f"{name}: {reason}")
    return None, refusals


def _try(kind: type[T], group: Group, device: Device) -> tuple[T | None, str]:
    """Return a transport that has allocated memory on all ranks of a group, or the reason why it has not."""
    reason = next(filter(None, group.comm.allgather(kind.probe(group))), "")
    if reason:
        return None, reason
    transport: T | None = None
    try:
        transport = kind(group, device)
        transport.allocate(_TRIAL_BYTES)
        transport.close()
    except RuntimeError as error:  # a TransportError, or CUDA's own
        reason = str(error)
    answers = group.comm.allgather((transport is not None, reason))
    reason = next((text for _, text in answers if text), "")
    if not reason:
        return transport, ""
    if transport is not None:
        transport.abort(reason)
        if all(is_made for is_made, _ in answers):
            transport.dispose()
    return None, reason


def warn_of_mpi(group: Group, reason: str) -> None:
    """Say that ranks of a node go on without the shared memory that they lack."""
    if group.rank == 0:
        warn_once(group.name, f"{reason}. The ranks of this node go on over mpi, which is slower")


def _warn_of_staging(hierarchy: Hierarchy, reason: str) -> None:
    if hierarchy.rank == 0:
        silenced = f"{settings.MPI_GPU.name}=off silences this"
        warn_once(reason, f"GPU memory is staged through host memory between nodes: {reason}; {silenced}")


def _path(taken: Mapping[str, str], between: str) -> str:
    """Return the selected transports as text."""
    kinds = set(taken.values())
    inside = (
        f"{kinds.pop()} inside nodes" if len(kinds) == 1 else ", ".join(f"{kind} in {node}" for node, kind in taken.items())
    )
    return ", ".join(filter(None, (inside, between))) or "one rank: nothing is sent"


def _on_host(hierarchy: Hierarchy, setting: settings.Setting[str]) -> str:
    """Return the transport of host memory that a setting names; auto, if it names one of device memory."""
    wanted = hierarchy.settings[setting]
    if wanted not in DEVICE_TRANSPORTS:
        return wanted
    if bound_device() is None:
        raise TransportError(
            f"{setting.name}={wanted} moves memory of GPUs, and these ranks compute on CPUs; accepted are "
            f"{_accepted_on_host(setting)}"
        )
    return "auto"


def _accepted_on_host(setting: settings.Setting[str]) -> str:
    return ", ".join(name for name in setting.choices if name not in DEVICE_TRANSPORTS)


def _make(wanted: str, order: Sequence[str], group: Group) -> tuple[Transport | None, str]:
    """Return the transport that is asked for, or with ``auto`` the first in `order` that serves; if there is none, why."""
    if wanted == "auto" and group.size == 1:
        return MpiTransport(group), ""  # a single rank needs no shared memory
    refusals = []
    for name in order if wanted == "auto" else (wanted,):
        reason = TRANSPORTS[name].probe(group)
        if not reason:
            try:
                return TRANSPORTS[name](group), ""
            except TransportError as error:
                reason = str(error)
                if wanted == "auto":
                    warn_of_mpi(group, reason)
        refusals.append(f"{name}: {reason}")
    return None, f"group {group.name} has no usable transport ({'; '.join(refusals)}); accepted are {', '.join(order)}"


def _on_all(hierarchy: Hierarchy, made: Sequence[tuple[Transport | None, str]]) -> list[Transport]:
    """Return the transports that `_make` has made; if one is missing on any rank, all dispose of theirs and raise."""
    transports = [transport for transport, _ in made if transport is not None]
    refusals = hierarchy.world_group.comm.allgather(next(filter(None, (reason for _, reason in made)), ""))
    if any(refusals):
        for transport in transports:
            transport.dispose()
        raise TransportError(next(filter(None, refusals)))
    return transports
