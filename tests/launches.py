"""On which numbers of ranks the tests of tests/ranks run, in the jobs of mpistrat's plugin for pytest.

A session that a launcher has started already (``mpiexec -n 4 pytest tests/ranks``, ``srun … pytest tests/ranks``) is one of the
ranks, and runs the tests of that number.
"""

import shutil
import tempfile
from functools import partial

import pytest

from mpistrat.launch.environment import detect
from mpistrat.pytest.rank_session import shape_of

NUM_RANKS = (1, 2, 3, 4, 8)
MOST_RANKS = 3  # of a test that says nothing else: more are processes that share two cores


def needs_ranks(minimum: int) -> pytest.MarkDecorator:
    """Mark a test that makes sense from this many ranks on."""
    return pytest.mark.mpi(min_size=minimum)


def up_to_ranks(maximum: int) -> pytest.MarkDecorator:
    """Mark a test that is tried on up to so many ranks rather than on up to MOST_RANKS."""
    return pytest.mark.mpi(max_size=maximum)


def on_ranks(*numbers: int) -> pytest.MarkDecorator:
    """Mark a test that proves no more on other numbers of ranks than on these."""
    return pytest.mark.mpi(sizes=numbers)


def is_one_rank(config: pytest.Config) -> bool:
    """Return whether the session is itself one rank of an MPI job."""
    view = detect()
    return bool(config.getoption("--with-mpi") or config.getoption("--only-mpi") or (view and view.rank is not None))


def numbers_of_ranks(config: pytest.Config, test: pytest.Item, most: int = MOST_RANKS) -> list[int]:
    """Return the numbers of ranks that a test is to run on, by default up to `most`; if there are none, one that it accepts."""
    marks = [mark.kwargs for mark in test.iter_markers("mpi")]
    unknown = set().union(*marks) - {"min_size", "max_size", "sizes"}
    if unknown:
        raise pytest.UsageError(f"{test.nodeid}: unknown {sorted(unknown)} in its mpi mark; see tests/launches.py")
    minima, maxima, sizes = ([mark[key] for mark in marks if key in mark] for key in ("min_size", "max_size", "sizes"))
    asked = _asked(config)
    candidates = sorted({*NUM_RANKS, *asked, *(number for each in sizes for number in each)})
    least = max(minima, default=1)
    most = min(maxima, default=candidates[-1] if sizes else max(most, least))
    accepted = [n for n in candidates if least <= n <= most and all(n in each for each in sizes)]
    return [number for number in accepted if number in asked] or accepted[:1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--num-ranks",
        default=",".join(map(str, NUM_RANKS)),
        metavar="N,N,…",
        help="run tests/ranks on these numbers of ranks (default: %(default)s)",
    )
    parser.addoption(
        "--kills",
        type=int,
        default=1,
        metavar="N",
        help="in tests/faults/test_lost_tasks.py, kill workers in N jobs, and a server in N/5 (default: %(default)s)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not is_one_rank(config) or hasattr(config, "workerinput"):
        return
    config.option.with_mpi = True
    # a directory of its own: ranks that tidy up the one they would share trip over each other
    config.option.basetemp = tempfile.mkdtemp(prefix="pytest-rank-", dir=config.option.basetemp)
    config.add_cleanup(partial(shutil.rmtree, config.option.basetemp, ignore_errors=True))
    view = detect()
    if view is not None and view.rank:
        config.pluginmanager.set_blocked("terminalreporter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = _asked(config)
    left_out = [item for item in items if (shape := shape_of(item)) and shape.num_ranks not in asked]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def _asked(config: pytest.Config) -> list[int]:
    view = detect() if is_one_rank(config) else None
    if view is not None and view.size:
        return [view.size]
    return [int(number) for number in str(config.getoption("--num-ranks")).split(",")]
