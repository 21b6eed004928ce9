"""Rails for GPU memory: passed to MPI directly if MPI is CUDA-aware, else staged through host memory.

Invariant: all rails of a job use the same transport; if one of them cannot use it, none does.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from mpistrat import settings
from mpistrat.device.abstract import Device
from mpistrat.errors import TransportError
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.cuda_awareness import find_verdict
from mpistrat.logger import logger
from mpistrat.transports.base import Transport
from mpistrat.transports.cuda_aware import CudaAwareTransport
from mpistrat.transports.staged import StagedTransport

__all__ = ["device_rails", "staged"]

_warned: set[str] = set()


def device_rails(hierarchy: Hierarchy, device: Device, host: Mapping[int, Transport]) -> tuple[Mapping[int, Transport], str]:
    """Return the transport of each rail for large buffers in GPU memory, and a description of them. A collective call.

    If MPI turns out not to be CUDA-aware, rank 0 prints a warning, once.

    Raises
    ------
    TransportError
        On all ranks, if MPISTRAT_MPI_GPU is on and MPI delivers wrong values, or if it delivers nothing within a minute.
    """
    if not host:
        return {}, ""
    rails, refusal = _cuda_aware(hierarchy, device)
    if rails:
        return rails, f"{CudaAwareTransport.name} between nodes"
    by_host = {shard: staged(hierarchy.rails[shard], device, rail) for shard, rail in host.items()}
    return by_host, f"staged over {next(iter(host.values())).name} between nodes ({refusal})"


def staged(group: Group, device: Device, host: Transport) -> Transport:
    """Return a transport that stages GPU memory through a transport of host memory."""
    return StagedTransport(group, device, lambda _: host)


def _cuda_aware(hierarchy: Hierarchy, device: Device) -> tuple[Mapping[int, Transport], str]:
    """Return rails that pass GPU memory to MPI, or the reason why there are none."""
    inter = hierarchy.settings[settings.INTER_TRANSPORT]
    if inter != "auto":
        return {}, f"{settings.INTER_TRANSPORT.name}={inter}"
    comm = hierarchy.world_group.comm
    verdict = bcast_or_raise(comm, find_verdict)
    if not verdict.is_aware:
        if not verdict.is_setting:
            _warn_once(hierarchy, verdict.reason)
        return {}, verdict.reason
    rails = {shard: CudaAwareTransport(rail, device) for shard, rail in hierarchy.rails.items()}
    # each rank goes through its rails in increasing order, so that they cannot deadlock
    found = [_first_exchange(rail) for rail in rails.values()]
    wrong, failed = (next(filter(None, texts), "") for texts in zip(*chain.from_iterable(comm.allgather(found)), strict=True))
    if failed:
        raise TransportError(failed)
    if not wrong:
        return rails, ""
    if verdict.is_setting:
        raise TransportError(f"{wrong}, and {verdict.reason} was set: unset it, or set it to off")
    _warn_once(hierarchy, wrong)
    return {}, wrong


def _first_exchange(rail: CudaAwareTransport) -> tuple[str, str]:
    """Return a reason why values were wrong, and one why the exchange failed: empty texts on success."""
    try:
        return rail.first_exchange(), ""
    except TransportError as error:
        return "", str(error)


def _warn_once(hierarchy: Hierarchy, reason: str) -> None:
    if hierarchy.rank == 0 and reason not in _warned:
        _warned.add(reason)
        silenced = f"{settings.MPI_GPU.name}=off silences this"
        logger.warning(f"GPU memory is staged through host memory between nodes: {reason}; {silenced}")
