"""Fixtures of tests that run on several ranks. Each is collective: every rank asks for it, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest

from mpistrat.launch.bootstrap import start
from mpistrat.topology.discover import discover
from mpistrat.topology.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.communicator.interface import BaseCommunicator
    from mpistrat.groups.group import Group
    from mpistrat.groups.hierarchy import Hierarchy
    from mpistrat.strategy.strategy import Strategy

# The node shapes of each number of ranks. Of 4 and 8 ranks those that fewer have not: several nodes of several ranks.
SHAPES = {
    1: ("1x1",),
    2: ("1x2", "2x1"),
    3: ("1x3", "2+1", "3x1"),
    4: ("1x4", "3+1", "2x2:cyclic"),
    8: ("2x4", "4x2:cyclic", "3+1+2+2"),
}
# What a strategy makes of its collectives hangs less on the shape.
# One shape of each number of ranks in which everything takes part, for what does not depend on the shape.
MIXED = {1: "1x1", 2: "2x1", 3: "2+1", 4: "3+1", 8: "3+1+2+2"}
STRATEGY_SHAPES = {**SHAPES, 3: ("2+1",), 4: ("2x2", "3+1"), 8: ("2x4", "3+1+2+2")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shape" in metafunc.fixturenames:
        metafunc.parametrize("shape", _shapes("strategy" in metafunc.fixturenames))


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("mpi")


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """Give the test a communicator of all ranks that nothing else sends on."""
    duplicate = start().Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def group(comm: MPI.Intracomm) -> Iterator[Group]:
    """Give the group of all ranks."""
    from mpistrat.groups.group import Group

    group = Group(comm.Dup(), "world", tuple(range(comm.size)))
    yield group
    group.close()


@pytest.fixture
def world(shape: str) -> World:
    """Give the picture of the present node shape."""
    return World.from_shape(shape)


@pytest.fixture
def hierarchy(comm: MPI.Intracomm, world: World) -> Iterator[Hierarchy]:
    """Give the groups of the present node shape."""
    from mpistrat.groups.hierarchy import Hierarchy

    groups = Hierarchy(comm, world)
    yield groups
    groups.close()


@pytest.fixture
def ops(comm: MPI.Intracomm, world: World) -> Iterator[BaseCommunicator]:
    """Give the all-reduce of the present node shape, with groups of its own."""
    from mpistrat.communicator.communicator import Communicator
    from mpistrat.groups.hierarchy import Hierarchy

    operations = Communicator(Hierarchy(comm, world))
    yield operations
    operations.close()


@pytest.fixture
def mixed(comm: MPI.Intracomm) -> Iterator[BaseCommunicator]:
    """Give the all-reduce of one shape."""
    from mpistrat.communicator.communicator import Communicator
    from mpistrat.groups.hierarchy import Hierarchy

    operations = Communicator(Hierarchy(comm, World.from_shape(MIXED.get(comm.size, f"{comm.size}x1"))))
    yield operations
    operations.close()


@pytest.fixture
def strategy(shape: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Strategy]:
    """Give the strategy that spans all ranks, on virtual nodes of the present shape."""
    from mpistrat.strategy.mirrored import MultiWorkerMirroredStrategy

    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", shape)
    strategy = MultiWorkerMirroredStrategy()
    yield strategy
    strategy.close()


@cache
def _shapes(of_strategies: bool) -> list[str]:
    """Return the shapes of these ranks whose nodes each lie within one machine, where ranks are on several."""
    comm = start().Dup()
    machines = [set(node.ranks) for node in discover(comm, "").nodes]
    comm.Free()
    size, table = start().size, STRATEGY_SHAPES if of_strategies else SHAPES
    return [shape for shape in table.get(size, (f"{size}x1",)) if _fits(shape, machines)]


def _fits(shape: str, machines: list[set[int]]) -> bool:
    return all(any(set(node.ranks) <= machine for machine in machines) for node in World.from_shape(shape).nodes)
