"""World, Node, Place: which rank is placed on which node, for any shape, without a job; and names of the ranks' devices.

TensorFlow's names stand for this rank's own device; others name that of another rank:

========================================  ===============================================================
name                                      device
========================================  ===============================================================
``/cpu:0``, ``CPU:0``, ``cpu``            that of the rank that uses the name; each rank has one
``/gpu:0``, ``GPU:0``, ``gpu``            the same, if ranks compute on GPUs; then there is no CPU device
``/device:CPU:0``                         the same
``/job:localhost/…/task:0/device:CPU:0``  the same, as TensorFlow prints it
``rank:3``                                the device of rank 3
``/job:worker/replica:0/task:3/…``        the same; ``device_name(3)`` returns this form
========================================  ===============================================================

Invariant: no MPI and no GPU here; `topology.discover` builds the world of a running job. Either all ranks of that compute on
GPUs or none does, so the others have the kind of device that this process has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpistrat.device.binding import own_device
from mpistrat.errors import InvalidArgumentError, TopologyError
from mpistrat.launch.environment import MOST_RANKS
from mpistrat.text import format_count, ranks_by

_SHAPES = "accepted are NODESxRANKS (2x4), ranks per node joined by + (3+1), each with :block or :cyclic behind it"


@dataclass(frozen=True)
class Node:
    """One machine (or virtual node), with the ranks on it in rising order."""

    index: int
    name: str
    ranks: tuple[int, ...]


class Place(NamedTuple):
    """The placement of one rank."""

    node: Node
    local_rank: int


@dataclass(frozen=True)
class World:
    """All nodes of a job. Nodes are ordered by their lowest rank.

    The buffer of a hierarchical collective has `num_shards` equal shards, as many as the largest node has ranks. On every
    node each shard is owned by one rank (`shards_of`); a smaller node's ranks own several. The owners of one shard, one
    per node, are a rail (`rails`).
    """

    nodes: tuple[Node, ...]

    @classmethod
    def from_node_of_rank(cls, node_of_rank: Sequence[int], names: Sequence[str] | None = None) -> World:
        """Build the world in which rank r is on the node labelled ``node_of_rank[r]``, whose name is ``names[r]``."""
        if not node_of_rank:
            raise TopologyError("a world needs at least one rank; got none")
        nodes = enumerate(ranks_by(enumerate(node_of_rank)).values())
        return cls(tuple(Node(index, names[ranks[0]] if names else f"node{index}", tuple(ranks)) for index, ranks in nodes))

    @classmethod
    def from_shape(cls, shape: str, num_ranks: int | None = None) -> World:
        """Build the world of a shape such as ``2x4``, ``3+1`` or ``2x2:cyclic``.

        Raises TopologyError if the shape is malformed, or does not have `num_ranks` ranks.
        """
        sizes, placement = parse_shape(shape)
        if num_ranks is not None and sum(sizes) != num_ranks:
            raise TopologyError(f"node shape {shape!r} describes {sum(sizes)} ranks, but there are {num_ranks}; {_SHAPES}")
        if placement == "block":
            return cls.from_node_of_rank([node for node, size in enumerate(sizes) for _ in range(size)])
        return cls.from_node_of_rank([node for turn in range(max(sizes)) for node, size in enumerate(sizes) if turn < size])

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @cached_property
    def local_sizes(self) -> tuple[int, ...]:
        """Ranks of each node."""
        return tuple(len(node.ranks) for node in self.nodes)

    @property
    def is_uniform(self) -> bool:
        """Whether every node has the same number of ranks."""
        return len(set(self.local_sizes)) == 1

    @cached_property
    def shape(self) -> str:
        """The shape as `from_shape` reads it, without the placement: ``2x4`` or ``3+1``."""
        if self.is_uniform:
            return f"{self.num_nodes}x{self.local_sizes[0]}"
        return "+".join(map(str, self.local_sizes))

    @cached_property
    def placement(self) -> str:
        """``block`` if consecutive ranks share a node, ``cyclic`` if ranks are placed round-robin, else ``mixed``."""
        if [rank for node in self.nodes for rank in node.ranks] == list(range(self.size)):
            return "block"
        cyclic = World.from_shape("+".join(map(str, self.local_sizes)) + ":cyclic")
        return "cyclic" if [node.ranks for node in cyclic.nodes] == [node.ranks for node in self.nodes] else "mixed"

    @cached_property
    def _places(self) -> dict[int, Place]:
        return {rank: Place(node, local_rank) for node in self.nodes for local_rank, rank in enumerate(node.ranks)}

    def place(self, rank: int) -> Place:
        """Return the placement of `rank`."""
        return self._places[rank]

    @cached_property
    def num_shards(self) -> int:
        """Shards of a hierarchical buffer: the ranks of the largest node."""
        return max(self.local_sizes)

    def owner(self, shard: int, node_index: int) -> int:
        """Return the rank of a node that owns a shard."""
        ranks = self.nodes[node_index].ranks
        return ranks[shard * len(ranks) // self.num_shards]

    @cached_property
    def rails(self) -> tuple[tuple[int, ...], ...]:
        """For each shard its owners, one per node, in node order."""
        return tuple(tuple(self.owner(shard, node) for node in range(self.num_nodes)) for shard in range(self.num_shards))

    def shards_of(self, rank: int) -> range:
        """Return the shards that a rank owns on its node: consecutive, and at least one."""
        node, local_rank = self._places[rank]
        first, end = (-(-number * self.num_shards // len(node.ranks)) for number in (local_rank, local_rank + 1))
        return range(first, end)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each node, in node order."""
        return tuple(node.ranks[0] for node in self.nodes)

    def __repr__(self) -> str:
        return f"World({self.shape}, {format_count(self.size, 'rank')} on {format_count(self.num_nodes, 'node')})"


def parse_shape(shape: str) -> tuple[tuple[int, ...], str]:
    """Return the number of ranks of each node, and the placement (``block`` or ``cyclic``), of a shape."""
    match = re.fullmatch(r"\s*(?:(\d+)x(\d+)|(\d+(?:\+\d+)*))\s*(?::\s*(block|cyclic)\s*)?", shape)
    if match is None:
        raise TopologyError(f"node shape {shape!r} is malformed; {_SHAPES}")
    if match[1] is not None:
        sizes = (int(match[2]),) * min(int(match[1]), MOST_RANKS + 1)
    else:
        sizes = tuple(int(size) for size in match[3].split("+"))
    if sum(sizes) > MOST_RANKS:
        raise TopologyError(f"node shape {shape!r} has more than {MOST_RANKS} ranks; {_SHAPES}")
    if not sizes or min(sizes) < 1:
        raise TopologyError(f"node shape {shape!r} has a node without ranks or no nodes; {_SHAPES}")
    return sizes, match[4] or "block"


_DEVICES = "accepted are /cpu:0, CPU:0, /gpu:0, /device:CPU:0, /job:worker/replica:0/task:1/device:CPU:0 and rank:1"
_RANK = re.compile(r"rank:(\d+)", re.IGNORECASE)
_NAME = re.compile(
    r"/?(?:job:(?P<job>[a-z][a-z0-9_]*)/)?(?:replica:(?P<replica>\d+)/)?(?:task:(?P<task>\d+)/)?"
    r"(?:device:)?(?P<kind>cpu|gpu)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class DeviceSpec:
    """A parsed device name."""

    kind: str  # CPU or GPU; empty if the name has only a rank
    index: int = 0  # among the rank's devices of that kind
    rank: int | None = None  # None: the rank that uses the name


def parse_device(name: object) -> DeviceSpec:
    """Parse a device name, whether or not there is such a device."""
    text = name.strip() if isinstance(name, str) else ""
    ranked = _RANK.fullmatch(text)
    if ranked:
        return DeviceSpec("", rank=int(ranked[1]))
    match = _NAME.fullmatch(text)
    if match is None or (match["task"] and not match["job"]):
        raise InvalidArgumentError(f"{name!r} is not a device name; {_DEVICES}")
    job = (match["job"] or "localhost").lower()
    if job not in ("localhost", "worker") or int(match["replica"] or 0) or (job == "localhost" and int(match["task"] or 0)):
        raise InvalidArgumentError(
            f"device {name!r} names a task that is not a rank: rank R is /job:worker/replica:0/task:R, and /job:localhost is "
            f"the calling rank; {_DEVICES}"
        )
    if job == "worker" and match["task"] is None:
        raise InvalidArgumentError(f"device {name!r} does not name a task; {_DEVICES}")
    return DeviceSpec(match["kind"].upper(), int(match["index"] or 0), int(match["task"]) if job == "worker" else None)


def device_name(rank: int) -> str:
    """Return the full name of a rank's device."""
    return f"/job:worker/replica:0/task:{rank}/device:{own_device()[1:].upper()}"


def ranks_of(name: object, world: World) -> tuple[int, ...]:
    """Return the ranks of a world that have the device of this name: one rank, or all if each has its own."""
    device = parse_device(name)
    driven = parse_device(own_device()).kind
    if device.kind not in ("", driven):
        other = "ranks compute on CPUs here" if driven == "CPU" else "ranks compute on GPUs here, unless MPISTRAT_DEVICE=cpu"
        raise InvalidArgumentError(f"device {name!r} does not exist: {other}; {_devices(world)}")
    if device.index:
        raise InvalidArgumentError(f"device {name!r} does not exist: each rank drives one device; {_devices(world)}")
    if device.rank is None:
        return tuple(range(world.size))
    if device.rank >= world.size:
        raise InvalidArgumentError(f"device {name!r} does not exist: there is no rank {device.rank}; {_devices(world)}")
    return (device.rank,)


def _devices(world: World) -> str:
    others = "rank:0" if world.size == 1 else f"rank:0 to rank:{world.size - 1}"
    return f"accepted are {own_device()} (each rank's own) and {others}"
