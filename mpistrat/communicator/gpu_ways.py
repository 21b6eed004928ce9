"""Communicators that carry out an all-reduce on GPUs in one of two ways each, to be timed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mpistrat import settings
from mpistrat.algorithms.cost import DEFAULT
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.topology.world import World
from mpistrat.tuning.gpu_measurements import BETWEEN_NODES, IN_SHOTS

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.settings import Setting


def gpu_ways(comm: MPI.Intracomm, world: World) -> tuple[dict[str, Communicator], str]:
    """Return a communicator for each way between which ``auto`` chooses on GPUs, or none and why. A collective call."""
    several = world.num_nodes > 1
    setting: Setting[str] | Setting[int | None] = settings.INTER_TRANSPORT if several else settings.ONE_SHOT_BYTES
    if setting.read() != setting.default:
        return {}, f"{setting.name} is set, and decides"
    found: dict[str, Communicator] = {}
    for way, times in (BETWEEN_NODES if several else IN_SHOTS).items():
        model, options = replace(DEFAULT, gpu_times=times), CommunicationOptions(algorithm="auto")
        found[way] = Communicator(Hierarchy(comm, world), options, model=model)
    refusal = next(filter(None, map(_refusal, found.values())), "")
    if refusal:
        for each in found.values():
            each.close()
    return ({}, refusal) if refusal else (found, "")


def _refusal(communicator: Communicator) -> str:
    """Return why a communicator cannot take its way, or an empty text: the same on all ranks."""
    assert communicator._gpu is not None, "all ranks drive a GPU"
    transports = communicator._gpu.executor.transports
    if communicator.world.num_nodes > 1:
        return transports.refusal and f"NCCL cannot join all ranks: {transports.refusal}"
    has_choice = transports.intra.one_shot_bytes is not None
    return "" if has_choice else f"the ranks of the node use {transports.intra.name}, which has no other way"
