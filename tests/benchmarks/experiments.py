"""The experiments, in the order of `all`: each measures, and returns its tables by what follows its name in theirs."""

from __future__ import annotations

from collections.abc import Callable

from tests.benchmarks import (
    checkpoint,
    data_parallel,
    deterministic,
    many_arrays,
    memory,
    messages,
    overhead,
    overlap,
    parameter_server,
    reduce_scatter,
    safety,
    safety_cost,
    wire_dtype,
)
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session

EXPERIMENTS: dict[str, Callable[[Session], dict[str, Table]]] = {
    "large_messages": messages.large_messages,
    "small_messages": messages.small_messages,
    "one_host": messages.one_host,
    "reduce_scatter": reduce_scatter.run,
    "many_arrays": many_arrays.run,
    "wire_dtype": wire_dtype.run,
    "deterministic": deterministic.run,
    "overlap": overlap.run,
    "overhead": overhead.run,
    "from_mpi4py": messages.from_mpi4py,
    "data_parallel": data_parallel.run,
    "memory": memory.run,
    "parameter_server": parameter_server.run,
    "checkpoint": checkpoint.run,
    "safety": safety.run,
    "safety_programs": safety.run_drawn,
    "safety_hangs": safety.run_hangs,
    "safety_cost": safety_cost.run,
}
