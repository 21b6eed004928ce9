"""A plugin of pytest: ``MPI.COMM_WORLD`` is wrapped, before the tests and the library that they are of see it.

With ``-p tests.interop.wrapped_world``. At the end rank 0 says how many collectives were made by this library.
"""

from collections import Counter

import pytest
from mpi4py import MPI

import mpistrat.mpi4py
from mpistrat.communicator.communicator import Communicator

_calls: Counter[str] = Counter()


def _counted(name: str) -> None:
    method = getattr(Communicator, name)

    def call(self, *arguments, **named):
        _calls[name] += 1
        return method(self, *arguments, **named)

    setattr(Communicator, name, call)


for _name in ("all_reduce", "start_all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"):
    _counted(_name)
MPI.COMM_WORLD = mpistrat.mpi4py.wrap(MPI.COMM_WORLD)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was counted."""
    if MPI.COMM_WORLD.rank == 0:
        terminalreporter.write_line(f"made by mpistrat: {dict(_calls)}")
