"""The lanes: what kinds of tests there are, what each needs, and which run at a time.

A session of all tests has two workers of pytest-xdist, if there are several cores: one runs the jobs of tests/ranks while the
other takes what needs one core, file by file; what mostly waits comes last, and both take it test by test.

A lane is a folder of tests/; tests directly in it are the lane `quality`. The tests of a lane that cannot run on this machine
are skipped, and say why; where MPISTRAT_REQUIRE_LANES (names joined by commas) demands the lane, they fail.
"""

import os
from collections.abc import Callable, Generator
from functools import cache
from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

from mpistrat.device.cuda import count_visible
from tests.hosts import lab
from tests.launches import is_one_rank
from tests.slurm import cluster

# Each lane, and what tells why it cannot run here (an empty text: it can).
LANES: dict[str, Callable[[], str]] = {
    "quality": lambda: "",
    "unit": lambda: "",
    "ranks": lambda: "",
    "faults": lambda: "",
    "tools": lambda: "",
    "docs": lambda: "",
    "hosts": lab.missing,
    "slurm": cluster.missing,
    "gpu": lambda: count_visible()[1],
}


# one process of `unit` compiles PyTorch and JAX, before all ranks of the jobs of `docs` would
_ORDER = ("ranks", "unit", "docs", "quality", "tools", "hosts", "slurm", "gpu", "faults")


def is_selection(config: pytest.Config) -> bool:
    """Return whether a session runs some tests rather than all."""
    option = config.option
    named = {(config.invocation_params.dir / argument).resolve() for argument in config.args}
    whole = bool(named & {config.rootpath, config.rootpath / "tests"})
    return not whole or bool(option.keyword or option.markexpr or option.collectonly or config.getoption("lf", False))


def lane_of(nodeid: str) -> str:
    parts = PurePosixPath(nodeid.split("::")[0]).parts
    return parts[1] if len(parts) > 1 and parts[1] in LANES else "quality"


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    option = config.option
    is_live = option.usepdb or option.capture == "no" or option.numprocesses is not None
    is_first = not (is_one_rank(config) or hasattr(config, "workerinput"))
    if is_first and not is_live and not is_selection(config) and len(os.sched_getaffinity(0)) > 1:
        option.numprocesses, option.dist, option.loadscopereorder = 2, "loadfile", False
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    unknown = _required() - set(LANES)
    if unknown:
        raise pytest.UsageError(f"MPISTRAT_REQUIRE_LANES names {', '.join(sorted(unknown))}; lanes are {', '.join(LANES)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    lane = lane_of(item.nodeid)
    if reason := _reason(lane):
        (pytest.fail if lane in _required() else pytest.skip)(f"the lane {lane} cannot run here: {reason}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, object, object]:
    done = yield
    # keeps the order of jobs, which the plugin has made
    items.sort(key=lambda item: _ORDER.index(lane_of(item.nodeid)))
    return done


def scope_of(nodeid: str) -> str:
    """Return what a test is handed to a worker with: mostly its file.

    The tests of one number of ranks share a job. Those of the last lane start jobs of their own, and are handed out one by one:
    so both workers end at the same time.
    """
    lane = lane_of(nodeid)
    if lane == _ORDER[-1]:
        return nodeid
    return lane if lane == "ranks" else nodeid.split("::")[0]


class _OneWorkerStartsJobs(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _OneWorkerStartsJobs:
    return _OneWorkerStartsJobs(config, log)


@cache
def _reason(lane: str) -> str:
    return LANES[lane]()


def _required() -> set[str]:
    return {lane.strip() for lane in os.environ.get("MPISTRAT_REQUIRE_LANES", "").split(",") if lane.strip()}
