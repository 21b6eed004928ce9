"""Hierarchy: the world split into INTRA, INTER (rails) and LEADERS.

    node0   node1        intra node0 = 0 1 2     rail 0 = 0 3      leaders = 0 3
    0 1 2   3 4          intra node1 = 3 4       rail 1 = 1 3
                                                 rail 2 = 2 4

Invariant: every communicator is a duplicate owned by this library; nothing is ever sent on the user's.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.groups.group import CallState, Group
from mpistrat.lazy import MPI
from mpistrat.text import spans_text
from mpistrat.topology.world import World
from mpistrat.watch.record import LONGEST_TEXT, NOT_LISTED


class Hierarchy:
    """The groups of this rank, of a communicator that is only duplicated. Making one is a collective call."""

    _numbers = iter(range(1, 2**31))

    def __init__(self, comm: MPI.Intracomm, world: World) -> None:
        assert comm.Get_size() == world.size, f"{world} cannot describe a communicator of {comm.Get_size()} ranks"
        self.world, self.rank = world, comm.Get_rank()
        self.place = world.place(self.rank)
        self.call = CallState()
        self.settings = self.call.settings
        self.world_group = Group(comm.Dup(), "world", self.call)
        self.job_ranks = self.world_group.ranks  # by which errors and records name them
        self.job_rank = self.job_ranks[self.rank]
        # a unique id, chosen by the first rank: ranks may have made different numbers of hierarchies before
        self.number: int = self.world_group.comm.bcast(MPI.COMM_WORLD.Get_rank() << 32 | next(self._numbers))
        node = self.place.node
        self.intra = Group(self.world_group.comm.Split(node.index, self.rank), f"intra {node.name}", self.call)
        several = world.num_nodes > 1
        # shard -> the group of its owners, for this rank's shards; created in rising order, which excludes a deadlock
        shards = world.shards_of(self.rank) if several else ()
        self.rails = {shard: self._subgroup(world.rails[shard], f"rail {shard}", shard) for shard in shards}
        is_leader = several and self.rank in world.leaders
        # the lowest ranks of all nodes; None on other ranks
        self.leaders = self._subgroup(world.leaders, "leaders", world.num_shards) if is_leader else None

    def _subgroup(self, ranks: tuple[int, ...], name: str, tag: int) -> Group:
        comm = self.world_group.comm
        whole = comm.Get_group()
        members = whole.Incl(ranks)
        joined = comm.Create_group(members, tag)
        members.Free()
        whole.Free()
        return Group(joined, name, self.call)

    @property
    def members(self) -> str:
        """The ranks of the job that these are, as the flight recorder writes them."""
        return members_text(self.job_ranks)

    def groups(self) -> list[Group]:
        """Return all groups of this rank, the world last."""
        parts = [*self.rails.values(), self.intra]
        return [*parts, *([self.leaders] if self.leaders else []), self.world_group]

    def close(self) -> None:
        """Free all communicators. A collective call."""
        for group in self.groups():
            group.close()

    def __repr__(self) -> str:
        return f"Hierarchy({self.world}, rank={self.rank})"


def members_text(job_ranks: Sequence[int]) -> str:
    """Return ranks of the job as text, "0-2 5": empty if they are all, NOT_LISTED if the text is too long."""
    if len(job_ranks) == MPI.COMM_WORLD.Get_size():
        return ""
    text = spans_text(sorted(job_ranks))
    return text if len(text) <= LONGEST_TEXT else NOT_LISTED
