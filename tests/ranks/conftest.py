"""Fixtures of tests that run on several ranks. Each is collective: every rank asks for it, in the same order."""

import io
import os
from contextlib import ExitStack
from functools import cache

import pytest

from mpistrat import settings
from mpistrat.launch.bootstrap import start
from mpistrat.logger import StderrHandler, logger
from mpistrat.topology.discover import discover
from mpistrat.topology.world import World
from tests.launches import MOST_RANKS, numbers_of_ranks

# The node shapes of each number of ranks. Of 4 and 8 ranks those that fewer have not: several nodes of several ranks.
SHAPES = {
    1: ("1x1",),
    2: ("1x2", "2x1"),
    3: ("1x3", "2+1", "3x1"),
    4: ("3+1", "2x2:cyclic"),
    8: ("4x2:cyclic", "3+1+2+2"),
}
MOST_RANKS_IN_SHAPES = 4  # with fewer there are no several nodes of several ranks
# One shape of each number of ranks in which everything takes part, for what does not depend on the shape.
MIXED = {1: "1x1", 2: "2x1", 3: "2+1", 4: "3+1", 8: "3+1+2+2"}
# What collectives on a stand-in device, whose streams dawdle, and strategies make of them hangs less on the shape.
PAIR_SHAPES = {**SHAPES, 3: ("2+1",), 4: ("3+1",)}
STRATEGY_SHAPES = {**SHAPES, 3: ("2+1",), 4: ("2x2", "3+1"), 8: ("3+1+2+2",)}


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Have each test that names none run on its numbers of ranks, or on the node shapes of these."""
    if metafunc.definition.get_closest_marker("ranks"):
        return
    names = metafunc.fixturenames
    of_ranks = PAIR_SHAPES if "make_pair" in names else SHAPES
    table = STRATEGY_SHAPES if "strategy" in names else of_ranks if "shape" in names else None
    most = MOST_RANKS if table is None else MOST_RANKS_IN_SHAPES
    numbers = numbers_of_ranks(metafunc.config, metafunc.definition, most)
    if table is None:
        mark = pytest.mark.ranks(*numbers)
    else:
        mark = pytest.mark.ranks(nodes=[shape for number in numbers for shape in table.get(number, (f"{number}x1",))])
    metafunc.definition.add_marker(mark)


@pytest.fixture
def shape():
    """Give the present node shape."""
    return os.environ[settings.VIRTUAL_NODES.name]


@pytest.fixture(autouse=True)
def _nodes_lie_within_machines():
    for node in World.from_shape(shape).nodes if (shape := os.environ[settings.VIRTUAL_NODES.name]) else ():
        if not any(set(node.ranks) <= machine for machine in _machines()):
            pytest.skip("a virtual node would span machines")


@cache
def _machines():
    comm = start().Dup()
    machines = [set(node.ranks) for node in discover(comm, "").nodes]
    comm.Free()
    return machines


@pytest.fixture
def said(monkeypatch):
    """Give what the library says during the test, wherever it would be shown."""
    stream = io.StringIO()
    monkeypatch.setattr(logger, "handlers", [StderrHandler(stream)])
    return stream


@pytest.fixture
def comm():
    """Give the test a communicator of all ranks that nothing else sends on."""
    duplicate = start().Dup()
    yield duplicate
    duplicate.Free()


@pytest.fixture
def group(comm):
    """Give the group of all ranks."""
    from mpistrat.groups.group import Group

    group = Group(comm.Dup(), "world")
    yield group
    group.close()


@pytest.fixture
def world(shape):
    """Give the picture of the present node shape."""
    return World.from_shape(shape)


@pytest.fixture
def hierarchy(comm, world):
    """Give the groups of the present node shape."""
    from mpistrat.groups.hierarchy import Hierarchy

    groups = Hierarchy(comm, world)
    yield groups
    groups.close()


@pytest.fixture
def make_ops(comm, monkeypatch):
    """Make collectives on a node shape, or on one node, by options and settings; they are closed when the test has ended."""
    from mpistrat.communicator.communicator import Communicator
    from mpistrat.groups.hierarchy import Hierarchy

    made = []

    def make(world=f"1x{comm.size}", options=None, **values):
        _set(monkeypatch, values)
        made.append(Communicator(Hierarchy(comm, _world_of(world)), options))
        return made[-1]

    yield make
    for operations in made:
        operations.close()


@pytest.fixture
def make_strategy(monkeypatch):
    """Make strategies, by default of all ranks, under some settings, in capitals; they are closed when the test has ended."""
    import mpistrat

    made = []

    def make(kind=mpistrat.MultiWorkerMirroredStrategy, *arguments, **named):
        _set(monkeypatch, {name: named.pop(name) for name in list(named) if name.isupper()})
        made.append(kind(*arguments, **named))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


def _set(monkeypatch, values):
    for name, value in values.items():
        monkeypatch.setenv(f"MPISTRAT_{name}", value)


def _world_of(world):
    return World.from_shape(world) if isinstance(world, str) else world


@pytest.fixture
def ops(make_ops, world):
    """Give the all-reduce of the present node shape, with groups of its own."""
    return make_ops(world)


@pytest.fixture
def mixed(comm, make_ops):
    """Give the all-reduce of one shape."""
    return make_ops(MIXED.get(comm.size, f"{comm.size}x1"))


@pytest.fixture
def make_pair(comm, monkeypatch):
    """Make collectives on a stand-in device and in host memory, as `make_ops` does."""
    from tests.gpu.bound import Pair

    def make(world=f"1x{comm.size}", has_nccl=True, **values):
        _set(monkeypatch, values)
        return stack.enter_context(Pair(comm, _world_of(world), has_nccl))

    with ExitStack() as stack:
        yield make
