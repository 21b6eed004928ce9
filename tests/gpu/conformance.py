"""The conformance kit on one transport of device memory, as the ranks of a job run it.

Several ranks may share a GPU. On several virtual nodes a transport that works inside a node is tried on every node at once,
one that works between nodes on every rail.
"""

import os
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

from mpistrat.execution.select import DEVICE_TRANSPORTS
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.bootstrap import start
from mpistrat.launch.cuda_awareness import find_verdict
from mpistrat.testing.transport_suite import check_transport
from mpistrat.topology.discover import discover
from mpistrat.transports import nccl
from mpistrat.transports.base import Transport
from mpistrat.transports.cuda_aware import CudaAwareTransport
from mpistrat.transports.nccl_bindings import BINDINGS
from mpistrat.transports.staged import StagedTransport
from tests.gpu.program import the_gpu, write_report

SUBJECTS: dict[str, type[Transport]] = {**DEVICE_TRANSPORTS, CudaAwareTransport.name: CudaAwareTransport}


def main(name: str, shape: str, *more: str) -> dict[str, int | str]:
    """Try a transport on nodes of a shape: on all groups that it serves. A collective call.

    With ``host-id-per-rank`` NCCL takes every rank for a host of its own, with the name of a binding it is called by that.

    Returns ``checks``: the comparisons made by all ranks together; or ``skipped``: why the transport declines these ranks.
    """
    comm = start()  # MPISTRAT_DEVICE says whether it binds a GPU
    if "host-id-per-rank" in more:
        os.environ["NCCL_HOSTID"] = f"rank{comm.Get_rank()}"  # NCCL asks for it once, when it is first used
    transport, hierarchy = SUBJECTS[name], Hierarchy(comm, discover(comm, shape))
    joins_nodes, make = transport not in (StagedTransport, CudaAwareTransport), partial(transport, device=the_gpu())
    # in the order in which all ranks try them; on one node, which has no rails, the world stands in
    groups = [hierarchy.intra] if joins_nodes else [*hierarchy.rails.values()] or [hierarchy.world_group]
    with ExitStack() as stack:
        for binding in BINDINGS.keys() & set(more):
            stack.enter_context(patch.object(nccl, "find_binding", BINDINGS[binding]))
        declined = comm.allgather("; ".join(filter(None, (_declined(make, group) for group in groups))))
        checks = 0 if any(declined) else sum(check_transport(make, group, between_nodes=not joins_nodes) for group in groups)
    hierarchy.close()
    return {"skipped": next(filter(None, declined))} if any(declined) else {"checks": sum(comm.allgather(checks))}


def _declined(make: partial[Transport], group: Group) -> str:
    """Return why a transport does not serve a group; MPI must be CUDA-aware, and prove it, before it gets memory of a GPU."""
    if make.func is not CudaAwareTransport:
        return make.func.probe(group)
    verdict = bcast_or_raise(group.comm, find_verdict)
    return make(group).first_exchange() if verdict.is_aware else verdict.reason


if __name__ == "__main__":
    write_report(main)
