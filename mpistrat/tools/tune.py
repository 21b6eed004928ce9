"""mpistrat tune: benchmark every algorithm on the ranks of a job, and cache the results, by which ``auto`` then chooses."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpistrat import cache
from mpistrat.algorithms.choose import PLANNERS, choose
from mpistrat.algorithms.cost import CostModel
from mpistrat.communicator.communicator import by_algorithm
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.launch.bootstrap import start
from mpistrat.launch.environment import detect
from mpistrat.settings import parse_bytes
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.tools import run
from mpistrat.topology.discover import discover
from mpistrat.tuning.file import kept, tuning_path
from mpistrat.tuning.measure import MAX_BYTES, measure
from mpistrat.tuning.model import ITEM_BYTES, Measurement, Tuning, present_conditions

LEAST_BYTES = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mpistrat tune``."""
    parser.description = (
        "Benchmark every all-reduce algorithm for some seconds, and cache the times in a file "
        "for this cluster, this MPI and this rank placement; auto chooses algorithms by it from then on. mpistrat tune -n 4 "
        "starts four ranks; or start it on all ranks of a job: srun python -m mpistrat tune."
    )
    run.add_own_rank_options(parser)
    parser.add_argument("--max-bytes", default=str(MAX_BYTES), metavar="SIZE", help="largest array (default: 16MiB)")
    parser.add_argument("--show", action="store_true", help="show the cached files, and measure nothing")


def execute(arguments: argparse.Namespace) -> int:
    """Measure, print and write, or show; return the exit code. Measuring is a collective call.

    With -n, outside of a job, the ranks of a job of its own measure.
    """
    if arguments.show:
        view = detect()
        if view is None or not view.rank:  # if several ranks run this, the first one does it
            _show()
        return 0
    max_bytes = _size(arguments.max_bytes)
    code = run.start_own_ranks(arguments)
    if code is not None:
        return code
    comm = start()
    world = discover(comm)
    if world.size == 1:
        raise LaunchError("a single rank has no other to communicate with; start more: mpistrat tune -n 4")
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
        advice = "Programs use it automatically; MPISTRAT_TUNING=off ignores it."
        print(f"\n{describe(tuning, path)}\n\nWrote {path}. {advice}")
    return 0


def describe(tuning: Tuning, path: Path) -> str:
    """Return the measurements and the choices of ``auto`` as text."""
    model = tuning.model(str(path))
    conditions = tuning.conditions
    heading = [("cluster", conditions.cluster), ("processor", conditions.processor), ("MPI", conditions.mpi)]
    heading += [("ranks", conditions.world), ("measured", tuning.date)]
    heading += [("settings", conditions.settings)] if conditions.settings else []
    return f"{format_table(heading)}\n\n{_choices(tuning.measurements, model)}"


def _choices(measurements: tuple[Measurement, ...], model: CostModel) -> str:
    """Return a table with the measurements and the choice of auto for each size."""
    found: dict[int, dict[str, float]] = {}
    for measurement in measurements:
        found.setdefault(measurement.num_bytes, {})[measurement.algorithm] = measurement.seconds
    names = [name for name in PLANNERS if any(name in times for times in found.values())]
    rows = [("size", *names, "auto chooses")]
    for num_bytes, times in sorted(found.items()):
        cells = [format_seconds(times[name]) if name in times else "-" for name in names]
        choice = choose(measurements[0].world, num_bytes // ITEM_BYTES, ITEM_BYTES, model=model)
        rows.append((format_bytes(num_bytes), *cells, choice.plan.algorithm))
    return format_table(rows, right=range(1, len(names) + 1))


def _show() -> None:
    found = kept()
    for path, tuning, problem in found:
        print(f"{path}\n\n{describe(tuning, path)}\n" if tuning else f"{path}\nignored: {problem}\n")
    print(f"{format_count(len(found), 'file')} of mpistrat tune in {cache.folder()}")


def _size(text: str) -> int:
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    if num_bytes < LEAST_BYTES:
        raise InvalidArgumentError(f"--max-bytes {num_bytes} is too small: accepted are sizes of at least {LEAST_BYTES} bytes")
    return num_bytes
