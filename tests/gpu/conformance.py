"""The conformance kit on one transport, as the ranks of a job run it: on real device memory where the transport is of a GPU.

    mpiexec -n 4 python -m tests.gpu.conformance cuda_ipc 2x2 --report FILE

Several ranks may share a GPU. On several virtual nodes a transport that works inside a node is tried on every node at once,
one that works between nodes on every rail.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

from mpistrat.execution.select import TRANSPORTS
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.bootstrap import start
from mpistrat.launch.cuda_awareness import find_verdict
from mpistrat.settings import INTER_TRANSPORT, INTRA_TRANSPORT
from mpistrat.testing.transport_suite import check_transport
from mpistrat.topology.discover import discover
from mpistrat.transports import nccl
from mpistrat.transports.base import Transport
from mpistrat.transports.cuda_aware import CudaAwareTransport
from mpistrat.transports.cuda_ipc import CudaIpcTransport
from mpistrat.transports.nccl import NcclTransport
from mpistrat.transports.nccl_bindings import BINDINGS
from mpistrat.transports.staged import StagedTransport
from tests.gpu.program import write_report

WORLD, NODES, RAILS = "world", "nodes", "rails"
"""Whom a transport joins: all ranks, those of a node, or those of a rail; where there is one node, its rails are not there,
and the world stands in."""


@dataclass(frozen=True)
class Subject:
    """A transport to try."""

    transport: type[Transport]  # its class
    joins: str  # WORLD, NODES or RAILS


def _on_host(transport: type[Transport]) -> Subject:
    """Return a transport of host memory, to try where settings can ask for it."""
    inside, between = (transport.name in setting.choices for setting in (INTRA_TRANSPORT, INTER_TRANSPORT))
    return Subject(transport, WORLD if inside and between else NODES if inside else RAILS)


SUBJECTS: dict[str, Subject] = {
    subject.transport.name: subject
    for subject in (
        *map(_on_host, TRANSPORTS.values()),
        Subject(StagedTransport, RAILS),
        Subject(CudaIpcTransport, NODES),
        Subject(CudaAwareTransport, RAILS),
        Subject(NcclTransport, NODES),
    )
}


def main(transport: str, shape: str, *more: str) -> dict[str, int | str]:
    """Try a transport on nodes of a shape.

    With ``host-id-per-rank`` NCCL takes every rank for a host of its own, with the name of a binding it is called by that.
    """
    comm = start()  # MPISTRAT_DEVICE says whether it binds a GPU
    if "host-id-per-rank" in more:
        os.environ["NCCL_HOSTID"] = f"rank{comm.Get_rank()}"  # NCCL asks for it once, when it is first used
    hierarchy = Hierarchy(comm, discover(comm, shape))
    with ExitStack() as stack:
        for name in BINDINGS.keys() & set(more):
            stack.enter_context(patch.object(nccl, "find_binding", BINDINGS[name]))
        found = check(SUBJECTS[transport], hierarchy)
    hierarchy.close()
    return found


def check(subject: Subject, hierarchy: Hierarchy) -> dict[str, int | str]:
    """Run the kit on all groups that a transport serves. A collective call.

    Returns ``checks``: the comparisons made by all ranks together; or ``skipped``: why the transport declines these ranks.
    """
    world = hierarchy.world_group
    groups = _groups(subject, hierarchy)
    declined = world.comm.allgather("; ".join(filter(None, (_declined(subject.transport, group) for group in groups))))
    if any(declined):
        return {"skipped": next(filter(None, declined))}
    checks = sum(check_transport(subject.transport, group, between_nodes=subject.joins != NODES) for group in groups)
    return {"checks": sum(world.comm.allgather(checks))}


def _declined(transport: type[Transport], group: Group) -> str:
    """Return why a transport does not serve a group; MPI must be CUDA-aware, and prove it, before it gets memory of a GPU."""
    if not issubclass(transport, CudaAwareTransport):
        return transport.probe(group)
    verdict = bcast_or_raise(group.comm, find_verdict)
    return transport(group).first_exchange() if verdict.is_aware else verdict.reason


def _groups(subject: Subject, hierarchy: Hierarchy) -> list[Group]:
    """Return the groups that this rank joins, in the order in which all ranks try them."""
    if subject.joins == NODES:
        return [hierarchy.intra]
    rails = list(hierarchy.rails.values()) if subject.joins == RAILS else []
    return rails or [hierarchy.world_group]


if __name__ == "__main__":
    write_report(main)
