"""The hooks and fixtures that pytest gets: the ``ranks`` mark, ``strategy`` and ``communicator``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import pytest

from mpistrat.errors import CollectiveError, TopologyError
from mpistrat.launch.environment import MOST_RANKS, detect
from mpistrat.pytest.rank_jobs import RankJobs
from mpistrat.pytest.rank_session import HAS_FAILED, PARAMETER, RankSession, Shape, shape_of
from mpistrat.topology.world import World

if TYPE_CHECKING:
    from mpistrat.communicator.communicator import Communicator
    from mpistrat.strategy.mirrored import MultiWorkerMirroredStrategy

TIMEOUT_SECONDS = 300.0
_ACCEPTED = 'accepted are numbers of ranks, shapes, or both: ranks(2, 4), ranks(nodes="2x2"), ranks(2, nodes=["2x2", "3+1"])'


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> Iterator[MultiWorkerMirroredStrategy]:
    """Give a `MultiWorkerMirroredStrategy` over the ranks that the test runs on. A collective call."""
    from mpistrat.strategy.mirrored import MultiWorkerMirroredStrategy

    made = MultiWorkerMirroredStrategy()
    yield made
    with _errors_after_a_failure(request):
        made.close()


@pytest.fixture
def communicator(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """Give a `Communicator` of the ranks that the test runs on. A collective call."""
    from mpistrat.communicator.communicator import Communicator
    from mpistrat.launch.bootstrap import start

    made = Communicator(start())
    yield made
    with _errors_after_a_failure(request):
        made.close()


def _errors_after_a_failure(request: pytest.FixtureRequest) -> AbstractContextManager[None]:
    """Suppress errors of collectives if the test has failed: its ranks may have made different calls."""
    return suppress(CollectiveError) if request.node.stash.get(HAS_FAILED, False) else nullcontext()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "ranks_timeout",
        f"seconds that a test with the ranks mark may take before its job is ended (default: {TIMEOUT_SECONDS:g})",
        default=str(TIMEOUT_SECONDS),
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark, and find out whether this pytest process is a rank, or starts the ranks."""
    config.addinivalue_line(
        "markers", "ranks(*numbers, nodes=()): run the test once on each number of ranks, and on each shape of virtual nodes"
    )
    plugins = config.pluginmanager
    if plugins.has_plugin(RankSession.NAME):  # of a job that `RankJobs` has started
        return
    if not _is_rank():
        plugins.register(RankJobs(config))
    elif config.getoption("--with-mpi", False):
        plugins.register(RankSession(config), RankSession.NAME)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Join the other ranks, if there are tests of ranks: a launcher may start sessions that need no MPI, too."""
    for item in items:
        if item.get_closest_marker("ranks") and shape_of(item) is None:
            raise pytest.UsageError(
                f"{item.nodeid} would run in this process alone: the ranks mark is for test functions, and methods of plain "
                "classes, that have it themselves, not for methods of unittest.TestCase or single parameters of a test"
            )
    plugins = config.pluginmanager
    if _is_rank() and not plugins.has_plugin(RankSession.NAME) and any(map(shape_of, items)):
        session = RankSession(config)
        plugins.register(session, RankSession.NAME)
        session.pytest_collection_modifyitems(items)


def _is_rank() -> bool:
    view = detect()
    return view is not None and view.rank is not None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each shape that a mark names."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    try:
        shapes = shapes_of(mark)
    except ValueError as error:
        raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from None
    metafunc.fixturenames.append(PARAMETER)  # so that the test function need not name it
    metafunc.parametrize(PARAMETER, shapes, ids=str)


def shapes_of(mark: pytest.Mark) -> list[Shape]:
    """Return the shapes that a ``ranks`` mark names; a ValueError says what is accepted instead."""
    arguments = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    text, nodes = f"pytest.mark.ranks({', '.join(arguments)})", mark.kwargs.get("nodes", ())
    shapes = [nodes] if isinstance(nodes, str) else [*map(str, nodes)] if isinstance(nodes, Iterable) else []
    if set(mark.kwargs) - {"nodes"} or not (mark.args or shapes) or not isinstance(nodes, Iterable):
        raise ValueError(f"{text}: {_ACCEPTED}")
    for number in mark.args:
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_RANKS:
            raise ValueError(f"{text}: {number!r} is not a number of ranks; {_ACCEPTED}")
    try:
        return [*map(Shape, mark.args), *(Shape(World.from_shape(shape).size, shape) for shape in shapes)]
    except TopologyError as error:
        raise ValueError(f"{text}: {error}") from None
