"""mpistrat tune: benchmark every algorithm on the ranks of a job, and cache the results, by which ``auto`` then chooses."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpistrat import cache, settings
from mpistrat.algorithms.choose import PLANNERS, choose
from mpistrat.algorithms.cost import CostModel
from mpistrat.communicator.communicator import by_algorithm
from mpistrat.device.binding import bound_device
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.launch.bootstrap import start
from mpistrat.launch.environment import detect
from mpistrat.settings import parse_bytes
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.topology.discover import discover
from mpistrat.tuning.file import tuning_path
from mpistrat.tuning.fit import ITEM_BYTES, Measurement, modelled_seconds, require_scipy
from mpistrat.tuning.measure import MAX_BYTES, measure
from mpistrat.tuning.model import Tuning, present_conditions

__all__ = ["add_arguments", "describe", "execute"]

LEAST_BYTES = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mpistrat tune``."""
    parser.description = (
        "Benchmark every all-reduce algorithm for some seconds, fit the constants of the cost model, and cache both in a file "
        "for this cluster, this MPI and this rank placement; auto chooses algorithms by it from then on. Start it on all "
        "ranks: mpistrat run -n 4 -m mpistrat tune, or with mpiexec or srun."
    )
    parser.add_argument("--max-bytes", default=str(MAX_BYTES), metavar="SIZE", help="largest array (default: 16MiB)")
    parser.add_argument("--show", action="store_true", help="show the cached files, and measure nothing")
    parser.add_argument("--delete", action="store_true", help="delete the cached files, and measure nothing")


def execute(arguments: argparse.Namespace) -> int:
    """Measure, print and write, or show or delete; return the exit code. Measuring is a collective call.

    Raises
    ------
    InvalidArgumentError
        If the size is invalid, or too small for a measurement.
    LaunchError
        If there is no MPI, no SciPy, or only one rank; or the file cannot be written.
    """
    if arguments.show or arguments.delete:
        view = detect()
        if view is None or not view.rank:  # if several ranks run this, the first one does it
            _for_each_file(delete=arguments.delete)
        return 0
    max_bytes = _size(arguments.max_bytes)
    require_scipy()
    comm = start()
    world = discover(comm)
    if world.size == 1:
        raise LaunchError("a single rank has no other to communicate with; start more: mpistrat run -n 4 -m mpistrat tune")
    is_chief = comm.Get_rank() == 0

    def report(num_bytes: int, times: dict[str, float]) -> None:
        if is_chief:
            figures = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in times.items())
            print(f"{format_bytes(num_bytes)}: {figures}", flush=True)

    measurements = measure(comm, world, by_algorithm, max_bytes, report)
    if is_chief:
        tuning = Tuning.of(present_conditions(world), measurements)
        path = tuning_path(tuning.conditions)
        try:
            cache.write(tuning.document(), path)
        except OSError as error:
            raise LaunchError(f"{path} cannot be written: {error}; set MPISTRAT_TUNING or XDG_CACHE_HOME") from None
        print(f"\n{describe(tuning, path)}\n\nWrote {path}. {_ADVICE}")
        if bound_device() is not None:
            print("It is used for arrays in host memory; for arrays on GPUs auto chooses by built-in constants.")
    return 0


_ADVICE = "Programs use it automatically; MPISTRAT_TUNING=off ignores it, mpistrat tune --delete removes it."


def describe(tuning: Tuning, path: Path) -> str:
    """Return the measurements, the choices of ``auto``, and the constants, as text."""
    model = tuning.model(str(path))
    conditions = tuning.conditions
    heading = [("cluster", conditions.cluster), ("processor", conditions.processor), ("MPI", conditions.mpi)]
    heading += [("ranks", conditions.world), ("measured", tuning.date)]
    heading += [("settings", conditions.settings)] if conditions.settings else []
    return "\n\n".join([format_table(heading), _choices(tuning.measurements, model), _constants(tuning)])


def _choices(measurements: tuple[Measurement, ...], model: CostModel) -> str:
    """Return a table with the measurements and the choice of auto for each size."""
    found: dict[int, dict[str, float]] = {}
    for measurement in measurements:
        found.setdefault(measurement.num_bytes, {})[measurement.algorithm] = measurement.seconds
    names = [name for name in PLANNERS if any(name in times for times in found.values())]
    rows = [("size", *names, "auto chooses")]
    for num_bytes, times in sorted(found.items()):
        chosen = choose(measurements[0].world, num_bytes // ITEM_BYTES, ITEM_BYTES, model=model).plan.algorithm
        cells = [format_seconds(times[name]) if name in times else "-" for name in names]
        rows.append((format_bytes(num_bytes), *cells, chosen))
    return format_table(rows, right=range(1, len(names) + 1))


def _constants(tuning: Tuning) -> str:
    constants = tuning.constants
    errors = sorted(abs(modelled_seconds(each, constants) / each.seconds - 1) for each in tuning.measurements)
    rows = [
        ("overhead of a phase of a chunk", format_seconds(constants.call_seconds)),
        ("synchronisation of two ranks of a node", format_seconds(constants.intra_step_seconds)),
        ("latency of a message between nodes", format_seconds(constants.inter_step_seconds)),
        ("link bandwidth of a node, each way", _rate(constants.link_bytes_per_second * constants.link_efficiency)),
        ("memory bandwidth of a rank, chunks in the cache", _rate(constants.cache_bytes_per_second)),
        ("memory bandwidth of a rank, larger chunks", _rate(constants.memory_bytes_per_second)),
    ]
    if len(tuning.measurements[0].world.nodes) == 1:
        rows = [row for row in rows if "between nodes" not in row[0] and "link" not in row[0]]
    return (
        f"{format_table(rows)}\n\nPredictions by these constants alone are off by {errors[len(errors) // 2]:.0%} in the median "
        f"and by {errors[-1]:.0%} at most; the measured times correct them for each algorithm and size."
    )


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _for_each_file(delete: bool) -> None:
    named = settings.TUNING.read()
    if named.lower() in ("auto", "off", "measure"):
        paths = sorted(cache.folder().glob("*.json"))
    else:
        paths = [path for path in [Path(named).expanduser()] if path.exists()]
    for path in paths:
        if delete:
            path.unlink()
            print(f"deleted {path}")
            continue
        print(path)
        try:
            print(f"\n{describe(Tuning.from_document(cache.read(path)), path)}\n")
        except (OSError, ValueError) as error:
            print(f"ignored: {error}\n")
    if not delete or not paths:
        print(f"{format_count(len(paths), 'file')} of mpistrat tune in {cache.folder()}")


def _size(text: str) -> int:
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    if num_bytes < LEAST_BYTES:
        raise InvalidArgumentError(f"--max-bytes {num_bytes} is too small: accepted are sizes of at least {LEAST_BYTES} bytes")
    return num_bytes
