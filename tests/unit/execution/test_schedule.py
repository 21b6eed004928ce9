"""The law of the schedule, by exhaustion: however ranks of a small world get on, all end, and each collective meets its like.

Ranks are simulated: an operation of a group is issued, and is through once all ranks of the group have issued theirs, as with
NCCL inside a node and messages between nodes. All states that can be reached by letting one rank or another take its next step
are visited.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from mpistrat.execution.program import Lanes, overlap
from mpistrat.steps import WAITING, Steps


class _World:
    """One run: ranks that have taken the steps of a prefix, and what each of them has done."""

    def __init__(self, nodes: int, local: int, chunks: int) -> None:
        self.groups: dict[tuple, list[str]] = {}
        self.local, self.nodes = local, nodes
        size = nodes * local
        self.logs: list[list[str]] = [[] for _ in range(size)]
        self.issued: list[dict[tuple, int]] = [{} for _ in range(size)]
        self.worked = [0] * size
        self.ended = [False] * size
        self.num_actors = size
        self.running = [
            overlap(
                Lanes(
                    lambda k, rank=rank: self._collective(rank, ("node", rank // local), f"scatter {k}"),
                    lambda k, rank=rank: self._collective(rank, ("rail", rank % local, k % 2), f"rail {k}"),
                    lambda k, rank=rank: self._collective(rank, ("node", rank // local), f"gather {k}"),
                    chunks,
                ),
                min(chunks, 2),
                min(chunks, 2),
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


class _Staged(_World):
    """One rank per node, which copies a chunk to the host before it goes between nodes, where operations have no channels.

    The copies are made by somebody else, each at its own time: what makes them is stepped like ranks.
    """

    def __init__(self, nodes: int, chunks: int, max_in_flight: int) -> None:
        super().__init__(nodes, 1, chunks)
        self.copied = [[False] * chunks for _ in range(nodes)]
        parts = [[partial(self._part, rank, name) for name in ("scatter", "rail", "gather")] for rank in range(nodes)]
        self.running = [overlap(Lanes(*three, chunks), 2, max_in_flight) for three in parts]
        self.num_actors = nodes * (1 + chunks)

    def step(self, actor: int) -> None:
        if actor < self.nodes:
            super().step(actor)
        else:
            rank, chunk = divmod(actor - self.nodes, len(self.copied[0]))
            self.copied[rank][chunk] = True

    def state(self) -> tuple:
        return *super().state(), tuple(map(tuple, self.copied))

    def _part(self, rank: int, name: str, chunk: int) -> Steps:
        if name == "rail":
            while not self.copied[rank][chunk]:
                yield WAITING
            yield from self._collective(rank, ("rail",), f"rail {chunk}")
        self.logs[rank].append(f"{name} {chunk}")


def _visit_all(make: Callable[[], _World]) -> int:
    """Visit every state; return how many there are."""
    seen = set()
    prefixes: list[tuple[int, ...]] = [()]
    while prefixes:
        prefix = prefixes.pop()
        moves = []
        for actor in range(make().num_actors):
            world = make()
            for taken in prefix:
                world.step(taken)
            before = world.state()
            if actor < len(world.ended) and world.ended[actor]:
                continue
            world.step(actor)
            if world.state() != before:
                moves.append(actor)
                if world.state() not in seen:
                    seen.add(world.state())
                    prefixes.append((*prefix, actor))
        assert moves or all(world.ended), f"all ranks wait for each other after {prefix}: {world.state()}"
    return len(seen)


@pytest.mark.parametrize(("nodes", "local", "chunks"), [(1, 2, 3), (2, 1, 3), (2, 2, 1), (1, 3, 2), (3, 1, 2)])
def test_every_interleaving_ends_and_collectives_meet_their_like(nodes, local, chunks):
    assert _visit_all(lambda: _World(nodes, local, chunks)) > 50


def test_where_chunks_are_copied_before_they_go_between_nodes_one_goes_at_a_time():
    assert _visit_all(lambda: _Staged(2, 2, max_in_flight=1)) > 50
    with pytest.raises(AssertionError, match=r"issues 'rail [01]' where a peer in \('rail',\) has issued 'rail [01]'"):
        _visit_all(lambda: _Staged(2, 2, max_in_flight=2))
