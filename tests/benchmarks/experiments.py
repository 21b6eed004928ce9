"""The experiments: each a module of this folder, with a caption, that runs, tabulates and draws one thing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol, cast

from tests.benchmarks.session import Session

__all__ = ["EXPERIMENTS", "Experiment", "find", "page_of"]

# In the order of `all`. One row here, one module, one page of docs/benchmarks: with its name, or with that of its PAGE.
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
    "scale",
    "safety",
    "safety_programs",
    "safety_hangs",
    "safety_cost",
)


class Experiment(Protocol):
    """What a module of an experiment has."""

    def run(self, session: Session) -> dict[str, Any]:
        """Measure; return what JSON can hold."""

    def table(self, result: dict[str, Any]) -> str:
        """Return the figures in Markdown: tables, and a line on each goal that says whether it was reached, and by how much."""

    def draw(self, result: dict[str, Any], path: Path) -> None:
        """Draw the figure to a PNG file."""


def find(name: str) -> Experiment:
    """Return the experiment of this name."""
    return cast(Experiment, importlib.import_module(f"tests.benchmarks.{name}"))


def page_of(name: str) -> str:
    """Return the name of the page that shows an experiment."""
    return str(getattr(find(name), "PAGE", name))
