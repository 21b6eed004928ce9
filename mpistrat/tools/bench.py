"""mpistrat bench: collectives measured against plain MPI in the same run, each result checked before it is timed.

Bandwidths are defined as in nccl-tests: algorithm bandwidth is bytes / time, bus bandwidth is that times 2 (n - 1) / n for n
ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

import mpistrat
from mpistrat.algorithms.planners import PLANNERS
from mpistrat.arrays import Array, array_module
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.device.binding import bound_device
from mpistrat.errors import CollectiveError, InvalidArgumentError
from mpistrat.groups.agreement import gather_or_raise
from mpistrat.groups.group import Group
from mpistrat.launch.bootstrap import library_version, start, what_is_bound
from mpistrat.launch.environment import detect
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp
from mpistrat.settings import parse_bytes
from mpistrat.steps import drive, until
from mpistrat.text import format_bytes, format_count
from mpistrat.tools import run
from mpistrat.tuning import ITEM_BYTES

ALGORITHMS = ("auto", *PLANNERS, "mpi")
_STEP_FACTOR = 4  # from one size to the next
BUDGET_SECONDS = 1.0  # of a size
MIN_BLOCKS, MAX_BLOCKS = 3, 20
MIN_ROUNDS, MAX_ROUNDS = 3, 20  # in a block; a third as many come first, untimed
DEADLINE_SECONDS = 60.0  # of a call on GPUs: another rank may not have made it


@dataclass(frozen=True)
class Row:
    """The result for one size; times are medians over the rounds of the slowest rank's time, bandwidths in 10⁹ bytes/s."""

    nbytes: int  # of the array on each rank
    plan: str  # the algorithm that ran
    transport: str  # by what rank 0 moved the bytes
    seconds: float
    mpi_seconds: float  # of MPI_Allreduce in the same rounds
    algorithm_gbs: float
    bus_gbs: float
    ratio: float  # mpi_seconds / seconds: above 1 is faster than MPI
    rounds: int  # that were timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Benchmark a collective against plain MPI. mpistrat bench all_reduce -n 4 starts four ranks; or start it on all ranks "
        "of a job: srun python -m mpistrat bench all_reduce."
    )
    parser.add_argument("collective", choices=("all_reduce",), help="the collective to benchmark")
    run.add_own_rank_options(parser)
    parser.add_argument("--min-bytes", default="8", metavar="SIZE", help="smallest array (default: 8)")
    parser.add_argument("--max-bytes", default="64MiB", metavar="SIZE", help="largest array, by factors of 4 (default: 64MiB)")
    parser.add_argument("--algorithm", default="auto", choices=ALGORITHMS, help="default: auto; mpi: plain MPI")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Check all arguments, then start MPI, or with -n ranks of a job, measure and print; return the exit code."""
    sizes = _sizes(arguments)
    comm = begin(arguments, sizes[-1])
    if isinstance(comm, int):
        return comm
    communicator = Communicator(comm)
    prints_table = communicator.rank == 0 and not arguments.json
    if prints_table:
        other = "; plain MPI in host memory" if communicator.path else ""
        print(f"all_reduce of float32, SUM, {communicator.world}, {library_version()}; {place_text(communicator)}{other}")
        print(f"{'size':>10}  {'plan':<12}  {'time':>12}  {'MPI':>12}  {'alg GB/s':>9}  {'bus GB/s':>9}  {'x MPI':>6}  by")
    rows = []
    for nbytes in sizes:
        row = measure(communicator, nbytes, arguments.algorithm)
        rows.append(row)
        if prints_table:
            times = f"{row.seconds * 1e6:9.1f} µs  {row.mpi_seconds * 1e6:9.1f} µs"
            rates = f"{row.algorithm_gbs:9.3f}  {row.bus_gbs:9.3f}  {row.ratio:6.2f}  {row.transport}"
            print(f"{format_bytes(row.nbytes):>10}  {row.plan:<12}  {times}  {rates}", flush=True)
    if communicator.rank == 0 and arguments.json:
        print(json.dumps(_document(communicator, rows), indent=1))
    communicator.close()
    return 0


def begin(arguments: argparse.Namespace, most_bytes: int) -> MPI.Intracomm | int:
    """Start MPI to measure arrays of up to so many bytes, or with -n ranks of a job that do so; return its exit code then.

    What one rank of a job refuses, all raise: it would leave the others waiting in MPI_Init.
    """
    code = run.start_own_ranks(arguments)
    if code is not None:
        return code
    comm = start()
    gather_or_raise(Group(comm, "world"), lambda: _check_memory(most_bytes))
    return comm


def measure(communicator: Communicator, nbytes: int, algorithm: str) -> Row:
    """Benchmark one size; a wrong result is a CollectiveError on every rank. A collective call."""
    comm = communicator.hierarchy.world_group.comm
    count = nbytes // ITEM_BYTES
    in_host = np.full(count, communicator.rank + 1, np.float32), np.empty(count, np.float32)
    module: Any = array_module() if communicator.path else np
    source, target = module.full(count, communicator.rank + 1, np.float32), module.empty(count, np.float32)
    bare = partial(comm.Allreduce, *in_host)
    by_mpi = bare, "mpi", "MPI_Allreduce"
    ours, plan, transport = by_mpi if algorithm == "mpi" else _ours(communicator, source, target, algorithm)
    calls: list[Callable[[], object]] = [timed(ours, communicator), bare]
    for call, result in zip(calls, (in_host[1] if algorithm == "mpi" else target, in_host[1]), strict=True):
        check_sum(comm, call, result)
    race = Race(comm, calls)
    seconds, mpi_seconds = race.run()
    algorithm_gbs = nbytes / seconds / 1e9
    bus_gbs = algorithm_gbs * 2 * (communicator.size - 1) / communicator.size
    return Row(nbytes, plan, transport, seconds, mpi_seconds, algorithm_gbs, bus_gbs, mpi_seconds / seconds, race.rounds)


def place_text(communicator: BaseCommunicator) -> str:
    """Return the memory that arrays are in, why, and on GPUs by which transports they are combined."""
    bound = what_is_bound()
    why = f" ({bound.why})" if bound is not None and bound.why else ""
    return f"on GPUs{why}, combined by {communicator.path}" if communicator.path else f"in host memory{why}"


def timed(run: Callable[[], object], communicator: Communicator) -> Callable[[], object]:
    """Return a call that returns when its results are complete: on GPUs, when an event recorded after them is done."""
    device = bound_device()
    if device is None or not communicator.path:
        return run

    def until_complete() -> None:
        run()
        drive(until(device.current_stream().record().done), lambda: "a call that is measured on GPUs", DEADLINE_SECONDS)

    return until_complete


def _ours(communicator: Communicator, source: Array, target: Array, algorithm: str) -> tuple[Callable[[], object], str, str]:
    # auto is the default of a call without options
    options = None if algorithm == "auto" else CommunicationOptions(algorithm=algorithm)
    [pack] = communicator.explain([source], options).packs
    call = partial(communicator.all_reduce, ReduceOp.SUM, [source], options, [target])
    return call, pack.choice.plan.algorithm, pack.transport or "nothing is sent"


def _sizes(arguments: argparse.Namespace) -> list[int]:
    first, last = parse_bytes(arguments.min_bytes), parse_bytes(arguments.max_bytes)
    if not ITEM_BYTES <= first <= last or first % ITEM_BYTES:
        raise InvalidArgumentError(
            f"sizes from {first} to {last} bytes cannot be measured: accepted are multiples of {ITEM_BYTES} bytes, "
            "--min-bytes not above --max-bytes"
        )
    sizes = [first]
    while sizes[-1] * _STEP_FACTOR <= last:
        sizes.append(sizes[-1] * _STEP_FACTOR)
    return sizes


def _check_memory(num_bytes: int) -> None:
    """Check that the ranks of this host can have arrays of a size, of which each takes four."""
    view = detect()
    ranks = (view.local_size if view else None) or 1
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (4 * ranks)
    if num_bytes > most:
        room = f"the memory of this host has room for {format_bytes(most)}, four times on {format_count(ranks, 'rank')}"
        raise InvalidArgumentError(f"arrays of {num_bytes:.3g} bytes are too large for a measurement: {room}; set --max-bytes")


def _document(communicator: Communicator, rows: list[Row]) -> dict[str, Any]:
    return {
        "collective": "all_reduce",
        "dtype": "float32",
        "mpistrat": mpistrat.__version__,
        "mpi": library_version(),
        "python": platform.python_version(),
        "world": communicator.world.shape,
        "ranks": communicator.size,
        "arrays": place_text(communicator),
        "rows": [asdict(row) for row in rows],
    }


def check_sum(comm: MPI.Intracomm, run: Callable[[], object], target: Array) -> None:
    """Run once on a target filled with NaN; a CollectiveError on every rank, unless all elements are the exact sum on all."""
    target.fill(np.nan)
    run()
    expected = comm.Get_size() * (comm.Get_size() + 1) // 2
    if not comm.allreduce(bool((target == expected).all()), MPI.LAND):
        raise CollectiveError(f"a wrong sum of {target.nbytes} bytes: not every element is {expected} on every rank")


class Race:
    """Times collective calls that do the same in alternating blocks, so that drift of the machine favours none."""

    def __init__(self, comm: MPI.Intracomm, calls: Sequence[Callable[[], object]], min_rounds: int = MIN_ROUNDS) -> None:
        self._comm, self._calls = comm, calls
        self._times: list[list[float]] = [[] for _ in calls]
        [spent] = slowest_seconds(comm, lambda: [call() for call in calls], 1)
        self._rounds = int(min(max(BUDGET_SECONDS / MIN_BLOCKS / spent, min_rounds), MAX_ROUNDS))

    @property
    def rounds(self) -> int:
        """How many calls of each were timed."""
        return len(self._times[0])

    @property
    def is_over(self) -> bool:
        """Whether enough was timed; the same on all ranks."""
        blocks, seconds = self.rounds // self._rounds, sum(map(sum, self._times))
        return blocks >= MIN_BLOCKS and (blocks >= MAX_BLOCKS or seconds >= BUDGET_SECONDS)

    def run_block(self) -> None:
        """Time a block of each call. A collective call."""
        for call, found in zip(self._calls, self._times, strict=True):
            for _ in range(self._rounds // 3):  # a real program repeats one call, and finds its own data in the cache
                self._comm.Barrier()
                call()
            found += slowest_seconds(self._comm, call, self._rounds)

    def medians(self) -> list[float]:
        """Return the median time of each call, over all rounds; the same on all ranks."""
        return [statistics.median(found) for found in self._times]

    def run(self) -> list[float]:
        """Time all blocks, and return the medians. A collective call."""
        while not self.is_over:
            self.run_block()
        return self.medians()


def slowest_seconds(comm: MPI.Intracomm, call: Callable[[], object], rounds: int) -> list[float]:
    """Return the time of the slowest rank in each of some rounds of a collective call. A collective call."""
    mine, slowest = np.empty(rounds), np.empty(rounds)
    for index in range(rounds):
        comm.Barrier()
        started = time.perf_counter()
        call()
        mine[index] = time.perf_counter() - started
    comm.Allreduce(mine, slowest, MPI.MAX)
    return [float(seconds) for seconds in slowest]
