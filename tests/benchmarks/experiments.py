"""The experiments: each a module of this folder, with a caption, that runs and tabulates one thing."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session

# In the order of `all`. One row here, one module, one table in docs/benchmarks/results.
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
    """What a module of an experiment has."""

    def run(self, session: Session) -> dict[str, Any]:
        """Measure; return what JSON can hold."""

    def tables(self, result: dict[str, Any]) -> dict[str, Table]:
        """Return the tables that are kept, by what follows the name of the experiment in theirs."""


def find(name: str) -> Experiment:
    """Return the experiment of this name."""
    return cast(Experiment, importlib.import_module(f"tests.benchmarks.{name}"))
