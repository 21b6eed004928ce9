"""The experiments: each runs and tabulates one thing, and is a module of this folder, or a value in one."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from tests.benchmarks import safety
from tests.benchmarks.messages import MESSAGES
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session

# In the order of `all`. One row here, one table in docs/benchmarks/results.
EXPERIMENTS = (
    "large_messages",
    "small_messages",
    "one_host",
    "reduce_scatter",
    "many_arrays",
    "wire_dtype",
    "deterministic",
    "overlap",
    "overhead",
    "from_mpi4py",
    "data_parallel",
    "memory",
    "choosing",
    "parameter_server",
    "safety",
    "safety_programs",
    "safety_hangs",
    "safety_cost",
)


class Experiment(Protocol):
    """What an experiment has, beside a caption."""

    def run(self, session: Session) -> dict[str, Any]:
        """Measure; return what JSON can hold."""

    def tables(self, result: dict[str, Any]) -> dict[str, Table]:
        """Return the tables that are kept, by what follows the name of the experiment in theirs."""


def find(name: str) -> Experiment:
    """Return the experiment of this name."""
    if name in MESSAGES:
        return MESSAGES[name]
    if name == "safety_programs":
        return safety.DRAWN
    return cast(Experiment, importlib.import_module(f"tests.benchmarks.{name}"))
