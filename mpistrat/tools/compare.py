"""mpistrat bench --compare: all algorithms and MPI, compared with the limit of the network links or the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import ReduceOp
from mpistrat.text import format_bytes, format_seconds, format_table
from mpistrat.tools.memory_rate import copy_bytes_per_second
from mpistrat.tools.turns import check_sum, take_turns
from mpistrat.tools.wire_rate import WireRate, find_wire

__all__ = ["COMPARED_BYTES", "Comparison", "Size", "compare"]

COMPARED_BYTES = (8, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
NOISE = 0.05  # times within this share of the best count as equal
COPIED_BYTES = 16 << 20
NEGLIGIBLE = 64 << 10  # below, latency is the limit, and a share of the bandwidth is meaningless
ITEM_BYTES = 4


@dataclass(frozen=True)
class Size:
    """The results for one size.

    Attributes
    ----------
    nbytes : int
        Bytes of the array on each rank.
    plan : str
        The algorithm that ``auto`` chose.
    seconds : dict
        Median of the slowest rank's time, by name: ``auto``, ``MPI``, and every algorithm that this world allows.
    limit_seconds : float
        The shortest time that the bandwidth of links, or memory, allows.
    """

    nbytes: int
    plan: str
    seconds: dict[str, float]
    limit_seconds: float

    @property
    def best(self) -> str:
        """The name with the shortest time."""
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def verdict(self) -> str:
        """``auto`` compared with the best."""
        factor = self.seconds["auto"] / self.seconds[self.best]
        return "auto is best" if factor <= 1 + NOISE else f"{self.best} takes {1 / factor:.2f} of auto's time"


@dataclass(frozen=True)
class Comparison:
    """The results of one run.

    Attributes
    ----------
    wire : WireRate or None
        The link between two machines; None if all ranks are on one.
    copy_bytes_per_second : float
        Bytes that each rank reads and writes per second while all copy.
    sizes : list of Size
        In increasing order of bytes.
    """

    wire: WireRate | None
    copy_bytes_per_second: float
    sizes: list[Size]

    def text(self) -> str:
        """Return a human-readable report."""
        return f"{self._limits()}\n\n{self._table()}\n\n{self._summary()}"

    def _limits(self) -> str:
        wire = str(self.wire) if self.wire else "none: all ranks are on one machine; several nodes are virtual ones"
        return f"wire: {wire}\nmemory: each rank reads and writes {self.copy_bytes_per_second / 1e9:.1f} GB/s while all copy"

    def _table(self) -> str:
        names = list(dict.fromkeys(name for size in self.sizes for name in size.seconds))
        head = ["size", *names, "plan", "x MPI", f"of {'wire' if self.wire else 'memory'}", "verdict"]
        rows = [[format_bytes(size.nbytes), *_times(size, names), *_judged(size)] for size in self.sizes]
        return format_table([head, *rows], right=[*range(len(names) + 1), len(names) + 2, len(names) + 3])

    def _summary(self) -> str:
        good = sum(size.seconds["auto"] <= (1 + NOISE) * size.seconds[size.best] for size in self.sizes)
        faster = sum(size.seconds["auto"] <= (1 + NOISE) * size.seconds["MPI"] for size in self.sizes)
        total = len(self.sizes)
        return (
            f"auto is within {NOISE:.0%} of the best at {good} of {total} sizes, and not slower than MPI at {faster}; "
            f"the limit is {'2 (n - 1) / n of the array over the wire' if self.wire else 'one copy of the array'}"
        )


def compare(ops: Communicator, sizes: Sequence[int]) -> Comparison:
    """Benchmark all algorithms and plain MPI at some sizes, alternately, with the bandwidth limits. A collective call.

    Parameters
    ----------
    ops : Communicator
        The ranks.
    sizes : sequence of int
        Bytes of the arrays of float32.

    Raises
    ------
    CollectiveError
        On every rank, if a result is wrong.
    """
    comm = ops.hierarchy.world_group.comm
    wire, copied = find_wire(comm), copy_bytes_per_second(comm, COPIED_BYTES)
    return Comparison(wire, copied, [_measure(ops, nbytes, wire, copied) for nbytes in sizes])


def _measure(ops: Communicator, nbytes: int, wire: WireRate | None, copied: float) -> Size:
    comm = ops.hierarchy.world_group.comm
    source: Array = np.full(nbytes // ITEM_BYTES, ops.rank + 1, np.float32)
    target = np.empty_like(source)
    choice = ops.choose(source.size, source.dtype)

    def ours(options: CommunicationOptions | None) -> Callable[[], object]:
        return lambda: ops.all_reduce(ReduceOp.SUM, [source], options, [target])

    fixed = {
        candidate.algorithm: ours(CommunicationOptions(algorithm=candidate.algorithm))
        for candidate in choice.considered
        if candidate.plan is not None
    }
    runs = {"auto": ours(None), "MPI": lambda: comm.Allreduce(source, target), **fixed}
    for run in runs.values():
        check_sum(comm, run, target)
    medians, _ = take_turns(comm, list(runs.values()), min_rounds=1)
    limit = wire.all_reduce_seconds(nbytes) if wire else 2 * nbytes / copied
    return Size(nbytes, choice.plan.algorithm, dict(zip(runs, medians, strict=True)), limit)


def _times(size: Size, names: Sequence[str]) -> list[str]:
    return [format_seconds(size.seconds[name]) if name in size.seconds else "-" for name in names]


def _judged(size: Size) -> list[str]:
    share = f"{size.limit_seconds / size.seconds['auto']:.2f}" if size.nbytes > NEGLIGIBLE else "-"
    return [size.plan, f"{size.seconds['MPI'] / size.seconds['auto']:.2f}", share, size.verdict]
