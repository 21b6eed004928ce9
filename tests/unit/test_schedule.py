"""The law of the schedule, by exhaustion: however ranks of a small world get on, all end, and each collective meets its like.

Ranks are simulated: an operation of a group is issued, and is through once all ranks of the group have issued theirs, as with
NCCL inside a node and messages between nodes. All states that can be reached by letting one rank or another take its next step
are visited.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpistrat.execution.lanes import overlap
from mpistrat.transports.base import WAITING, Steps

Schedule = Callable[..., Steps]


class _World:
    """One run: ranks that have taken the steps of a prefix, and what each of them has done."""

    def __init__(self, nodes: int, local: int, chunks: int, schedule: Schedule) -> None:
        self.groups: dict[tuple, list[str]] = {}
        self.local, self.nodes = local, nodes
        size = nodes * local
        self.logs: list[list[str]] = [[] for _ in range(size)]
        self.issued: list[dict[tuple, int]] = [{} for _ in range(size)]
        self.worked = [0] * size
        self.ended = [False] * size
        self.running = [
            schedule(
                chunks,
                min(chunks, 2),
                min(chunks, 2),
                lambda k, rank=rank: self._collective(rank, ("node", rank // local), f"scatter {k}"),
                lambda k, rank=rank: self._collective(rank, ("rail", rank % local, k % 2), f"rail {k}"),
                lambda k, rank=rank: self._collective(rank, ("node", rank // local), f"gather {k}"),
            )
            for rank in range(size)
        ]

    def step(self, rank: int) -> None:
        answer = next(self.running[rank], None)
        self.ended[rank] = answer is None
        self.worked[rank] += bool(answer)

    def state(self) -> tuple:
        return tuple((tuple(log), worked, end) for log, worked, end in zip(self.logs, self.worked, self.ended, strict=True))

    def _collective(self, rank: int, group: tuple, name: str) -> Steps:
        members = self.local if group[0] == "node" else self.nodes
        position = self.issued[rank].get(group, 0)
        self.issued[rank][group] = position + 1
        order = self.groups.setdefault(group, [])
        if position == len(order):
            order.append(name)
        assert order[position] == name, f"rank {rank} issues {name!r} where a peer in {group} has issued {order[position]!r}"
        self.logs[rank].append(f"issue {name}")
        while sum(issued.get(group, 0) > position for issued in self.issued) < members:
            yield WAITING
        self.logs[rank].append(f"end {name}")


def _visit_all(nodes: int, local: int, chunks: int, schedule: Schedule) -> int:
    """Visit every state; return how many there are."""
    seen = set()
    prefixes: list[tuple[int, ...]] = [()]
    while prefixes:
        prefix = prefixes.pop()
        moves = []
        for rank in range(nodes * local):
            world = _World(nodes, local, chunks, schedule)
            for taken in prefix:
                world.step(taken)
            before = world.state()
            if world.ended[rank]:
                continue
            world.step(rank)
            if world.state() != before:
                moves.append(rank)
                if world.state() not in seen:
                    seen.add(world.state())
                    prefixes.append((*prefix, rank))
        assert moves or all(world.ended), f"all ranks wait for each other after {prefix}: {world.state()}"
    return len(seen)


@pytest.mark.parametrize(("nodes", "local", "chunks"), [(1, 2, 3), (2, 1, 3), (2, 2, 1), (1, 3, 2), (3, 1, 2)])
def test_every_interleaving_ends_and_collectives_meet_their_like(nodes, local, chunks):
    assert _visit_all(nodes, local, chunks, overlap) > 50


def _eager(num_chunks: int, depth: int, abreast: int, head: Callable, middle: Callable, tail: Callable) -> Steps:
    """Break the law: gather whichever chunk is through between the nodes, before the next one is begun."""
    through: list[int] = []

    def inter(chunk: int) -> Steps:
        yield from middle(chunk)
        through.append(chunk)

    lanes: list[Steps] = []
    begun = gathered = 0
    while gathered < num_chunks:
        if through:
            yield from tail(through.pop())
            gathered += 1
        elif begun < num_chunks:
            yield from head(begun)
            lanes.append(inter(begun))
            begun += 1
        lanes = [lane for lane in lanes if next(lane, None) is not None]
        yield WAITING


def test_a_schedule_by_readiness_is_caught():
    with pytest.raises(
        AssertionError, match=r"issues 'scatter 1' where a peer in \('node', \d\) has issued 'gather 0'|issues 'ga"
    ):
        _visit_all(2, 2, 2, _eager)
