"""Select the transports of a rank's groups: those that the settings name, or the first ones that can be used.

Invariant: all ranks of a group use the same transport. It is used only if every rank supports it; if one rank raises, all do.
What a rank finds out alone, by a probe or by trying, it tells the others before anybody uses the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from mpistrat import settings
from mpistrat.device.binding import bound_device
from mpistrat.device.cuda import Device
from mpistrat.errors import MpistratError, TransportError
from mpistrat.groups.agreement import bcast_or_raise, gather_or_raise
from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.cuda_awareness import find_verdict
from mpistrat.logger import warn_once
from mpistrat.transports.base import DeviceTransport, Transport
from mpistrat.transports.cuda_aware import CudaAwareTransport
from mpistrat.transports.cuda_ipc import CudaIpcTransport
from mpistrat.transports.mpi import MpiTransport
from mpistrat.transports.mpi_world import WorldTransport
from mpistrat.transports.nccl import NcclTransport
from mpistrat.transports.ring import MpiRingTransport
from mpistrat.transports.shared_memory import SharedMemoryTransport
from mpistrat.transports.staged import StagedTransport

TRANSPORTS: dict[str, type[Transport]] = {one.name: one for one in (MpiTransport, MpiRingTransport, SharedMemoryTransport)}
DEVICE_TRANSPORTS: dict[str, type[DeviceTransport]] = {
    one.name: one for one in (NcclTransport, CudaIpcTransport, StagedTransport)
}

_ON_DEVICE = {*DEVICE_TRANSPORTS, CudaAwareTransport.name}
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
    wanted, between = (_on_host(hierarchy, setting) for setting in (settings.INTRA_TRANSPORT, settings.INTER_TRANSPORT))
    automatic = _INTRA if hierarchy.intra.size > 1 else (MpiTransport.name,)  # a single rank needs no shared memory
    inside, found = _inside_nodes(hierarchy, _kinds(TRANSPORTS, wanted, automatic))
    if inside is None:
        group, why = next((f"intra {each.node}", each.why) for each in found if not each.kind)
        raise _unusable(settings.INTRA_TRANSPORT, wanted, group, why)
    warn_of_next(hierarchy.intra, found[hierarchy.rank].why, inside.name)
    kinds = _kinds(TRANSPORTS, between, _INTER)
    made, group, why = _first_usable(kinds, hierarchy.rails.values(), hierarchy.world_group)
    if made is None:
        inside.dispose()
        raise _unusable(settings.INTER_TRANSPORT, between, group, why)
    if made:
        warn_of_next(hierarchy.world_group, why, made[0].name)
    rails = small_rails = dict(zip(hierarchy.rails, made, strict=True))
    if between == "auto":
        small_rails = {shard: MpiTransport(rail) for shard, rail in hierarchy.rails.items()}
    return Transports(inside, WorldTransport(hierarchy, inside.window), rails, small_rails)


def device_transports(hierarchy: Hierarchy, device: Device, host: Transports) -> DeviceTransports:
    """Return the transports of device memory. A collective call.

    All ranks raise if the settings name a transport that a node does not support, or say that MPI is CUDA-aware and it is not.
    """
    world, wanted = hierarchy.world_group, hierarchy.settings[settings.INTRA_TRANSPORT]
    table: dict[str, type[Any]] = {**DEVICE_TRANSPORTS, MpiTransport.name: StagedTransport}
    automatic = _INTRA_ON_DEVICE if hierarchy.intra.size > 1 else _ALONE_ON_DEVICE
    if wanted in TRANSPORTS and wanted not in table:
        reasons = dict.fromkeys(f"{node.name}: {wanted} moves memory of the host" for node in hierarchy.world.nodes)
        raise _cannot_move(settings.INTRA_TRANSPORT, wanted, reasons, ("auto", *table))
    intra, found = _inside_nodes(hierarchy, _kinds(table, wanted, automatic), device)
    if intra is None:
        reasons = dict.fromkeys(f"{each.node}: {each.why}" for each in found if not each.kind)
        raise _cannot_move(settings.INTRA_TRANSPORT, wanted, reasons, ("auto", *table))
    taken = {each.node: each.label for each in found if not each.is_alone}
    everywhere, lacks = _join_all(hierarchy, device, intra)
    rails, between = _device_rails(hierarchy, device, host.rails, everywhere)
    if any(isinstance(rail, CudaAwareTransport) for rail in rails.values()):
        intra.has_windows = False
    others = dict.fromkeys(each for each in found if not each.is_alone and each.kind != NcclTransport.name)
    why = next((each.why for each in found if each.why), "")
    if lacks and lacks not in why:
        between += f"; not by nccl: {lacks}"
    world_by_host, intra_by_host = _staged(world, device, {world: host.world, hierarchy.intra: None})
    return DeviceTransports(
        intra=intra,
        world=host.world,
        world_by_host=world_by_host,
        rails=rails,
        small_rails=rails,
        intra_by_host=intra_by_host,
        path=_path(taken, between),
        why=why,
        lacks_nccl="; ".join(f"{each.node} uses {each.kind}{f' ({each.why})' if each.why else ''}" for each in others),
        has_channels=all(rail.has_channels for rail in rails.values()),
        everywhere=everywhere,
        combine_halves=all(DEVICE_TRANSPORTS[each.kind].combines_halves for each in found),
    )


def _inside_nodes(hierarchy: Hierarchy, kinds: Sequence[type[Any]], *arguments: Device) -> tuple[Any, list[_Found]]:
    """Return the transport inside this rank's node, or None on all ranks if a node has none; and what each rank found.

    A collective call.
    """
    made, _, why = _first_usable(kinds, [hierarchy.intra], hierarchy.intra, *arguments)
    node = hierarchy.place.node.name
    kind, label = (made[0].name, made[0].label) if made else ("", "")
    found = hierarchy.world_group.comm.allgather(_Found(node, kind, label, why, hierarchy.intra.size == 1))
    if made and all(each.kind for each in found):
        return made[0], found
    for transport in made or ():
        transport.dispose()
    return None, found


def _first_usable(
    kinds: Sequence[type[Any]], groups: Collection[Group], over: Group, *arguments: Device
) -> tuple[list[Any] | None, str, str]:
    """Return a transport for each of some groups, of the first kind that serves all ranks of `over`, or None; and why no other.

    A collective call. Why is a group that the last one does not serve, and what was found of each kind.
    """
    found: list[str] = []
    group = ""
    probed = over.comm.allgather([_refused(kind.probe, groups) for kind in kinds])
    for kind, answers in zip(kinds, zip(*probed, strict=True), strict=True):
        made, refused = _make(kind, groups, over, *arguments) if not any(answers) else ([], [*chain(*answers)])
        if not refused:
            return made, "", "; ".join(found)
        group, reason = refused[0]
        found.append(f"{kind.name}: {reason}")
    return None, group, "; ".join(found)


def _make(kind: Any, groups: Collection[Group], over: Group, *arguments: Device) -> tuple[list[Any], list[tuple[str, str]]]:
    """Return a transport for each group that has allocated memory, and what any rank lacks: then nobody keeps any."""
    made: list[Any] = []

    def make(group: Group) -> str:
        made.append(transport := kind(group, *arguments))
        if transport.device is not None:
            transport.allocate(_TRIAL_BYTES)
            transport.close()
        return ""

    mine = _refused(make, groups)
    lacks = {group.name for group in groups} - {transport.group.name for transport in made}
    refusals, lacking = zip(*over.comm.allgather((mine, lacks)), strict=True)
    refused = [*chain(*refusals)]
    for transport in made if refused else ():
        if transport.device is not None:
            transport.abort(refused[0][1])
        if transport.group.name not in chain(*lacking):  # the ranks of a group dispose of it together
            transport.dispose()
    return made, refused


def _refused(act: Callable[[Group], str], groups: Collection[Group]) -> list[tuple[str, str]]:
    """Return the groups for which an act returns or raises a reason, and that reason.

    Ranks go through their groups in increasing order, so that they cannot deadlock.
    """
    refused = []
    for group in groups:
        try:
            reason = act(group)
        except Exception as error:  # on one rank, perhaps: the others must learn of it
            reason = str(error) if isinstance(error, MpistratError) else f"{type(error).__name__}: {error}"
        if reason:
            refused.append((group.name, reason))
    return refused


def _kinds(table: Mapping[str, type[Any]], wanted: str, automatic: Sequence[str]) -> list[type[Any]]:
    return [table[name] for name in (automatic if wanted == "auto" else (wanted,))]


def _staged(world: Group, device: Device, over: Mapping[Group, Transport | None]) -> list[StagedTransport]:
    """Return transports through the host for some groups; all ranks raise what one of them lacks."""
    made: list[StagedTransport] = []
    gather_or_raise(world, lambda: made.extend(StagedTransport(group, device, host) for group, host in over.items()))
    return made


def _join_all(hierarchy: Hierarchy, device: Device, intra: DeviceTransport) -> tuple[NcclTransport | None, str]:
    """Return NCCL over all ranks, that of the node where there is one, and why auto does not take it between nodes."""
    if hierarchy.world.num_nodes == 1:
        return intra if isinstance(intra, NcclTransport) else None, ""
    wanted, world = hierarchy.settings[settings.INTER_TRANSPORT], hierarchy.world_group
    if wanted == "auto":
        made, _, why = _first_usable([_NcclOverAdapters], [world], world, device)
        return made[0] if made else None, why.removeprefix("nccl: ")
    if wanted != NcclTransport.name:
        return None, ""
    try:
        [transport] = _nccl(hierarchy, device, [world])
    except TransportError as error:
        intra.abort(str(error))
        raise
    return transport, ""


def nccl_rails(hierarchy: Hierarchy, device: Device, everywhere: NcclTransport) -> Mapping[int, NcclTransport]:
    """Return NCCL along each rail of this rank; all ranks raise if those of one rail cannot join. A collective call."""
    if hierarchy.world.num_shards == 1:
        return {0: everywhere}
    return dict(zip(hierarchy.rails, _nccl(hierarchy, device, hierarchy.rails.values()), strict=True))


def _nccl(hierarchy: Hierarchy, device: Device, groups: Collection[Group]) -> list[NcclTransport]:
    """Return NCCL over groups of several nodes, where a setting has asked for it or auto has taken it."""
    made, _, why = _first_usable([NcclTransport], groups, hierarchy.world_group, device)
    if made is None:
        setting, wanted = settings.INTER_TRANSPORT, hierarchy.settings[settings.INTER_TRANSPORT]
        accepted = [name for name in setting.choices if name not in (wanted, NcclTransport.name)]
        raise _cannot_move(setting, wanted, [why.removeprefix("nccl: ")], accepted)
    return made


def _device_rails(
    hierarchy: Hierarchy, device: Device, host: Mapping[int, Transport], everywhere: NcclTransport | None
) -> tuple[Mapping[int, DeviceTransport], str]:
    """Return the transport of each rail for large buffers in GPU memory, and what is between nodes, as text.

    A collective call. All rails of a job use the same: MPI directly if it is CUDA-aware on all of them, else host memory. If it
    turns out not to be, rank 0 prints a warning, once; if MPISTRAT_MPI_GPU says that it is, or nothing is delivered, all ranks
    raise. Where NCCL joins all ranks, what it does not combine goes through host memory.
    """
    if not host:
        return {}, ""
    rails, refusal = ({}, "") if everywhere else _cuda_aware(hierarchy, device)
    between = f"{CudaAwareTransport.name} between nodes"
    if not rails:
        staged = _staged(hierarchy.world_group, device, {hierarchy.rails[shard]: rail for shard, rail in host.items()})
        rails = dict(zip(host, staged, strict=True))
        between = f"staged over {next(iter(host.values())).name} between nodes ({refusal})"
    return rails, f"{everywhere.label} between nodes" if everywhere else between


def _cuda_aware(hierarchy: Hierarchy, device: Device) -> tuple[Mapping[int, DeviceTransport], str]:
    """Return rails that pass GPU memory to MPI, or the reason why there are none."""
    inter, is_wanted = settings.INTER_TRANSPORT, hierarchy.settings[settings.INTER_TRANSPORT] == CudaAwareTransport.name
    if not is_wanted and hierarchy.settings[inter] != "auto":
        return {}, f"{inter.name}={hierarchy.settings[inter]}"
    comm = hierarchy.world_group.comm
    verdict = bcast_or_raise(comm, find_verdict)
    if not verdict.is_aware:
        if is_wanted:
            raise _cannot_move(inter, CudaAwareTransport.name, [verdict.reason], inter.choices)
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
    if is_wanted:
        raise _cannot_move(inter, CudaAwareTransport.name, [wrong], inter.choices)
    if verdict.is_setting:
        raise TransportError(f"{wrong}, and {verdict.reason} was set: unset it, or set it to off")
    _warn_of_staging(hierarchy, wrong)
    return {}, wrong


def warn_of_next(group: Group, reason: str, taken: str) -> None:
    """Say that ranks go on over the transport that is `taken` in the place of a faster one, if there is a reason."""
    if reason and group.rank == 0:
        warn_once(group.name, f"{reason}. These ranks ({group.name}) go on over {taken}, which is slower")


def _warn_of_staging(hierarchy: Hierarchy, reason: str) -> None:
    if hierarchy.rank == 0:
        silenced = f"{settings.MPI_GPU.name}=off silences this"
        warn_once(reason, f"GPU memory is staged through host memory between nodes: {reason}; {silenced}")


def _path(taken: Mapping[str, str], between: str) -> str:
    """Return the selected transports as text."""
    kinds = set(taken.values())
    inside = f"{kinds.pop()} inside nodes" if len(kinds) == 1 else ", ".join(f"{by} in {node}" for node, by in taken.items())
    return ", ".join(filter(None, (inside, between))) or "one rank: nothing is sent"


def _on_host(hierarchy: Hierarchy, setting: settings.Setting[str]) -> str:
    """Return the transport of host memory that a setting names; auto, if it names one of device memory."""
    wanted = hierarchy.settings[setting]
    if wanted not in _ON_DEVICE:
        return wanted
    if bound_device() is None:
        raise TransportError(f"{setting.name}={wanted} moves GPU memory, and ranks compute on CPUs; {_accepted(setting)}")
    return "auto"


def _unusable(setting: settings.Setting[str], wanted: str, group: str, refusals: str) -> TransportError:
    what = f"group {group} has no usable transport ({refusals})"
    return TransportError(f"{what}: {setting.name} is {wanted}, and {_accepted(setting)}")


def _accepted(setting: settings.Setting[str]) -> str:
    return f"accepted are {', '.join(name for name in setting.choices if name not in _ON_DEVICE)}"


def _cannot_move(setting: settings.Setting[str], name: str, reasons: Iterable[str], accepted: Iterable[str]) -> TransportError:
    return TransportError(
        f"{setting.name}={name} cannot move memory of GPUs here: {'; '.join(reasons)}. Accepted are {', '.join(accepted)}"
    )


class _Found(NamedTuple):
    """What a rank found inside its node."""

    node: str
    kind: str  # the name of its transport; empty: there is none
    label: str
    why: str  # none of those before it
    is_alone: bool


class _NcclOverAdapters(NcclTransport):
    """NCCL as auto takes it between nodes: not over sockets, where MPI may have an adapter."""

    @classmethod
    def probe(cls, group: Group) -> str:
        return super().probe(group) or cls.network_refusal()
