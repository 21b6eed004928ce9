"""The experiments, in the order of `all`: each measures, and returns its tables by what follows its name in theirs."""

from collections.abc import Callable

from tests.benchmarks import costs, messages, safety, training, variants
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session

EXPERIMENTS: dict[str, Callable[[Session], dict[str, Table]]] = {
    "large_messages": messages.large_messages,
    "small_messages": messages.small_messages,
    "one_host": messages.one_host,
    "reduce_scatter": variants.reduce_scatter,
    "many_arrays": costs.many_arrays,
    "wire_dtype": variants.wire_dtype,
    "deterministic": variants.deterministic,
    "overlap": costs.overlap,
    "overhead": costs.overhead,
    "from_mpi4py": messages.from_mpi4py,
    "data_parallel": training.data_parallel,
    "memory": costs.memory,
    "parameter_server": training.parameter_server,
    "checkpoint": training.checkpoint,
    "safety": safety.run,
    "safety_programs": safety.run_drawn,
}
