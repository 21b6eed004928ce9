"""The hooks and fixtures that pytest gets: the ``ranks`` mark, ``strategy`` and ``communicator``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import pytest

from mpistrat.errors import CollectiveError
from mpistrat.launch.environment import detect
from mpistrat.pytest.rank_jobs import RankJobs
from mpistrat.pytest.rank_session import HAS_FAILED, RankSession
from mpistrat.pytest.rank_shapes import PARAMETER, shape_of, shapes_of

if TYPE_CHECKING:
    from mpistrat.communicator.communicator import Communicator
    from mpistrat.strategy.mirrored import MultiWorkerMirroredStrategy

TIMEOUT_SECONDS = 300.0


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
    """Declare the plugin's setting."""
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
