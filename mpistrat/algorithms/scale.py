"""Predicted times of an all-reduce on thousands of nodes: our plans by the cost model, other algorithms by closed formulas.

n nodes of r ranks, placed in blocks; p = n·r; S bytes on each rank; α: a message between nodes; 1/β: the bandwidth of a node's
link; 1/γ: what a rank reads and writes per second. All algorithms get the same constants, full bisection bandwidth, and no
contention but that of a node's ranks for its links. If a node has several, a ring over all ranks uses one of them.

================================  ===================  =======================  ==========================================
algorithm                         messages in a row    bytes over a link        also
================================  ===================  =======================  ==========================================
ring over all ranks               2(p-1)               2(p-1)/p·S               sums after each message, or beside it
halving and doubling (all ranks)  2·log2 n             2(n-1)/n·S               sums after each message
recursive doubling (all ranks)    log2 n               log2 n·r·S               sums all after each message
rails: halving and doubling       2·log2 n             2(n-1)/n·S               reduce-scatter and all-gather in the node
================================  ===================  =======================  ==========================================

Halving and doubling over all ranks begins inside the nodes, so that only 1/r of each rank's buffer leaves a node. With cyclic
placement the whole buffer does.

Sources: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH. IJHPCA 19(1), 2005.
Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations. JPDC 69(2), 2009 (rings).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mpistrat.algorithms import hierarchical, pipelined
from mpistrat.algorithms.cost import DEFAULT, CostModel, predict_seconds
from mpistrat.algorithms.plan import Plan
from mpistrat.errors import InvalidArgumentError
from mpistrat.topology.world import World

__all__ = ["ASSUMPTIONS", "PREDICTORS", "assumptions_text", "predict_scale"]

ASSUMPTIONS = (
    "full bisection, no contention between nodes",
    "ranks in blocks, all in step",
    "the same constants for every algorithm: peers differ by what they send, not by how fast their code is",
)

_ITEM_BYTES = 4


@dataclass(frozen=True)
class _Job:
    """The size of the job and of the buffer, and the constants."""

    nodes: int
    ranks: int
    num_bytes: int
    model: CostModel

    @property
    def link_seconds(self) -> float:
        """Time to send the buffer over one link of a node once."""
        return self.num_bytes / (self.model.link_bytes_per_second * self.model.link_efficiency)

    @property
    def links_seconds(self) -> float:
        """Time to send the buffer over the links of a node once, all of its ranks together."""
        return self.link_seconds / min(self.model.links, self.ranks)

    @property
    def memory_seconds(self) -> float:
        """Time for a rank to read or write the buffer once."""
        return self.num_bytes / self.model.memory_bytes_per_second

    @property
    def rounds(self) -> int:
        """ceil(log2 n)."""
        return (self.nodes - 1).bit_length()

    @property
    def share(self) -> float:
        """2(n-1)/n: the bytes that must leave a node, for each byte of the buffer."""
        return 2 * (self.nodes - 1) / self.nodes


def _flat_ring(job: _Job, overlapped: bool) -> float:
    ranks = job.nodes * job.ranks
    share = 2 * (ranks - 1) / ranks
    # the ring crosses each link once, and in each step all ranks wait for the slowest message: the one between nodes
    step = job.model.inter_step_seconds if job.nodes > 1 else job.model.intra_step_seconds
    sums, sending = 3 / 2 * share * job.memory_seconds, share * job.link_seconds if job.nodes > 1 else 0.0
    return 2 * (ranks - 1) * step + (max(sending, sums) if overlapped else sending + sums)


def _halving(job: _Job) -> float:
    inside = (job.ranks - 1).bit_length()
    steps = 2 * (job.rounds * job.model.inter_step_seconds + inside * job.model.intra_step_seconds)
    return steps + job.share * job.links_seconds + 3 * job.memory_seconds


def _doubling(job: _Job) -> float:
    inside = (job.ranks - 1).bit_length()
    steps = job.rounds * job.model.inter_step_seconds + inside * job.model.intra_step_seconds
    return steps + job.rounds * job.ranks * job.links_seconds + 3 * (job.rounds + inside) * job.memory_seconds


def _rails(job: _Job) -> float:
    inside, calls = 0.0, 1
    if job.ranks > 1:
        passes = (2 + 1 + 1 / job.ranks) + 2  # the reduce-scatter and the all-gather, as `cost` counts them
        inside = passes * job.memory_seconds + 3 * (job.ranks - 1).bit_length() * job.model.intra_step_seconds
        calls = 3
    sums = 3 / 2 * job.share / job.ranks * job.memory_seconds
    steps = 2 * job.rounds * job.model.inter_step_seconds
    return calls * job.model.call_seconds + inside + steps + max(job.share * job.links_seconds, sums)


def _planned(job: _Job, planner: Callable[[World, int, int, int], Plan]) -> float:
    world = World.from_shape(f"{job.nodes}x{job.ranks}")
    return predict_seconds(planner(world, -(-job.num_bytes // _ITEM_BYTES), _ITEM_BYTES, 0), job.model)


PREDICTORS: dict[str, Callable[[_Job], float]] = {
    "flat ring (Open MPI ring)": lambda job: _flat_ring(job, overlapped=False),
    "flat ring, overlapped (gloo, TensorFlow)": lambda job: _flat_ring(job, overlapped=True),
    "flat halving and doubling (Rabenseifner)": _halving,
    "flat recursive doubling": _doubling,
    "mpistrat hierarchical (rings along rails)": lambda job: _planned(job, hierarchical.plan),
    "mpistrat pipelined (the same, in chunks)": lambda job: _planned(job, pipelined.plan),
    "halving and doubling along rails": _rails,
}
"""Algorithm -> its predicted seconds for a job."""


def predict_scale(nodes: int, ranks_per_node: int, num_bytes: int, model: CostModel = DEFAULT) -> dict[str, float]:
    """Return the predicted seconds of an all-reduce by every algorithm in `PREDICTORS`.

    Parameters
    ----------
    nodes, ranks_per_node : int
        At least 1 each.
    num_bytes : int
        Size of the buffer on each rank.
    model : CostModel
        The constants; its corrections are not used, because they hold for one world only.

    Raises
    ------
    InvalidArgumentError
        If a number is out of range.
    """
    for name, value, least in (("nodes", nodes, 1), ("ranks_per_node", ranks_per_node, 1), ("num_bytes", num_bytes, 0)):
        if value < least:
            raise InvalidArgumentError(f"{name} must be at least {least}; got {value}")
    if nodes * ranks_per_node == 1 or not num_bytes:
        return dict.fromkeys(PREDICTORS, 0.0)
    job = _Job(nodes, ranks_per_node, num_bytes, replace(model, corrections=()))
    return {name: seconds(job) for name, seconds in PREDICTORS.items()}


def assumptions_text(model: CostModel = DEFAULT) -> str:
    """Return the assumptions of the predictions, one on each line."""
    alpha = f"α {model.inter_step_seconds * 1e6:.3g} µs between nodes, {model.intra_step_seconds * 1e6:.3g} µs inside"
    rate = f"{model.link_bytes_per_second * model.link_efficiency / 1e9:.3g} GB/s"
    beta = f"1/β {rate} per node link" if model.links == 1 else f"1/β {rate} on each of {model.links} links of a node"
    gamma = f"1/γ {model.memory_bytes_per_second / 1e9:.3g} GB/s per rank"
    return "\n".join([f"{alpha}; {beta}; {gamma} ({model.source})", *ASSUMPTIONS])
