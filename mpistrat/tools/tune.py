"""mpistrat tune: benchmark every algorithm on the ranks of a job, and cache the results, by which ``auto`` then chooses."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from mpistrat.algorithms.planners import NOTHING, PLANNERS, choose
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError, LaunchError, TransportError
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.launch.environment import promised_place
from mpistrat.reduction import Array, ReduceOp
from mpistrat.settings import parse_bytes
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.tools import run
from mpistrat.tools.bench import Race, begin
from mpistrat.topology.world import World
from mpistrat.tuning import ITEM_BYTES, Seconds, Tuning, kept, present_conditions, tuning_path, world_like

LEAST_BYTES, MAX_BYTES = 1024, 2**24
_MIN_BYTES, _STEP_FACTOR = 16, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Benchmark every all-reduce algorithm for some seconds, and cache the times in a file "
        "for this cluster, this MPI and this rank placement; auto chooses algorithms by it from then on. mpistrat tune -n 4 "
        "starts four ranks; or start it on all ranks of a job: srun python -m mpistrat tune."
    )
    run.add_own_rank_options(parser)
    parser.add_argument("--max-bytes", default=str(MAX_BYTES), metavar="SIZE", help="largest array (default: 16MiB)")
    parser.add_argument("--show", action="store_true", help="show the cached files, and measure nothing")


def execute(arguments: argparse.Namespace) -> int:
    """Measure, here or with -n on ranks of a job, print and write, or show; return the exit code."""
    if arguments.show:
        if not promised_place()[0]:  # if several ranks run this, the first one does it
            _show()
        return 0
    max_bytes = parse_bytes(arguments.max_bytes)
    if max_bytes < LEAST_BYTES:
        raise InvalidArgumentError(f"--max-bytes {max_bytes} is too small: accepted are sizes of at least {LEAST_BYTES} bytes")
    comm = begin(arguments, max_bytes)
    if isinstance(comm, int):
        return comm
    if comm.Get_size() == 1:
        raise LaunchError("a single rank has no other to communicate with; start more: mpistrat tune -n 4")
    with Communicator(comm, measured=NOTHING, uses_gpu=False) as communicator:
        world = communicator.world
        conditions = present_conditions(world)
        path = bcast_or_raise(comm, lambda: tuning_path(conditions))  # before it takes its time
        seconds = measure(communicator, max_bytes)
    if communicator.rank == 0:
        tuning = Tuning(conditions, seconds)
        try:
            tuning.write(path)
        except OSError as error:
            raise LaunchError(f"{path} cannot be written: {error}; set MPISTRAT_TUNING or XDG_CACHE_HOME") from None
        advice = "Programs use it automatically; MPISTRAT_TUNING=off ignores it."
        print(f"{describe(tuning, world, path)}\n\nWrote {path}. {advice}")
    return 0


def measure(communicator: Communicator, max_bytes: int) -> Seconds:
    """Return the time of each algorithm, from 16 bytes to about `max_bytes`. A collective call."""
    sizes = _sizes(max_bytes)
    found = _seconds(communicator, sizes)
    fastest = [min(found[size], key=lambda name: found[size][name]) for size in sizes]
    changes = [2 * size for size, (one, following) in zip(sizes, pairwise(fastest), strict=False) if one != following]
    found |= _seconds(communicator, changes)
    by_name = {name: {size: found[size][name] for size in sorted(found) if name in found[size]} for name in PLANNERS}
    return {name: seconds for name, seconds in by_name.items() if seconds}


def _seconds(communicator: Communicator, sizes: list[int]) -> dict[int, dict[str, float]]:
    """Return the seconds of each algorithm that works, by size and name."""
    calls = {size: _calls(communicator, size) for size in sizes}
    races = {size: Race(communicator.hierarchy.world_group.comm, [*found.values()]) for size, found in calls.items()}
    while going := [race for race in races.values() if not race.is_over]:  # all sizes in turn: drift favours none
        for race in going:
            race.run_block()
    return {size: dict(zip(calls[size], race.medians(), strict=True)) for size, race in races.items()}


def _calls(communicator: Communicator, size: int) -> dict[str, Callable[[], object]]:
    source: Array = np.ones(size // ITEM_BYTES, np.float32)
    calls = dict[str, Callable[[], object]]()
    target = np.empty_like(source)
    for name in PLANNERS:
        options = CommunicationOptions(algorithm=name)
        with suppress(TransportError):  # raised on all ranks: too little shared memory for this algorithm
            call = partial(communicator.all_reduce, ReduceOp.SUM, [source], options, [target])
            call()
            calls[name] = call
    return calls


def _sizes(max_bytes: int) -> list[int]:
    """Return sizes up to a power of two."""
    sizes = [1 << max_bytes.bit_length() - 1]
    while sizes[-1] // _STEP_FACTOR >= _MIN_BYTES:
        sizes.append(sizes[-1] // _STEP_FACTOR)
    return sizes[::-1]


def describe(tuning: Tuning, world: World, path: Path) -> str:
    """Return the measurements and the choices of ``auto`` as text."""
    conditions = tuning.conditions
    heading = [("cluster", conditions.cluster), ("processor", conditions.processor), ("MPI", conditions.mpi)]
    heading += [("ranks", conditions.world), ("measured", tuning.date)]
    heading += [("settings", conditions.settings)] if conditions.settings else []
    seconds, measured = tuning.seconds, tuning.measured(str(path))
    rows = [("size", *seconds, "auto chooses")]
    for num_bytes in sorted({num_bytes for times in seconds.values() for num_bytes in times}):
        cells = [format_seconds(times[num_bytes]) if num_bytes in times else "-" for times in seconds.values()]
        choice = choose(world, num_bytes // ITEM_BYTES, ITEM_BYTES, measured=measured)
        rows.append((format_bytes(num_bytes), *cells, choice.plan.algorithm))
    return f"{format_table(heading)}\n\n{format_table(rows, right=range(1, len(seconds) + 1))}"


def _show() -> None:
    place, found = kept()
    for path, tuning, problem in found:
        shown = f"\n{describe(tuning, world_like(tuning.conditions), path)}" if tuning else f"ignored: {problem}"
        print(f"{path}\n{shown}\n")
    print(f"{format_count(len(found), 'file')} of mpistrat tune in {place}")
