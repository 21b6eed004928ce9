"""mpistrat bench: collectives measured against plain MPI in the same run, each result checked before it is timed.

The two are timed alternately: see `turns`. Bandwidths are defined as in nccl-tests: algorithm bandwidth is bytes / time, bus
bandwidth is that times 2 (n - 1) / n for n ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import mpistrat
from mpistrat.algorithms.choose import PLANNERS
from mpistrat.arrays import Array
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.launch.bootstrap import library_version, start
from mpistrat.reduction import ReduceOp
from mpistrat.settings import parse_bytes
from mpistrat.text import format_bytes
from mpistrat.tools import run
from mpistrat.tools.bench_memory import DEVICES, communicator, filled, place_text, prefer, timed
from mpistrat.tools.interleaved import check_sum, time_interleaved

__all__ = ["Row", "add_arguments", "execute", "measure"]

ALGORITHMS = ("auto", *PLANNERS, "mpi")
ITEM_BYTES = 4


@dataclass(frozen=True)
class Row:
    """The result for one size.

    Attributes
    ----------
    nbytes : int
        Bytes of the array on each rank.
    plan : str
        The algorithm that ran.
    seconds, mpi_seconds : float
        Median over the rounds of the slowest rank's time: of mpistrat, and of ``MPI_Allreduce`` in the same rounds.
    algorithm_gbs, bus_gbs : float
        Bandwidths in GB/s (10⁹ bytes).
    ratio : float
        mpi_seconds / seconds: above 1 is faster than MPI.
    rounds : int
        How many rounds were timed.
    """

    nbytes: int
    plan: str
    seconds: float
    mpi_seconds: float
    algorithm_gbs: float
    bus_gbs: float
    ratio: float
    rounds: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mpistrat bench``."""
    parser.description = (
        "Benchmark a collective against plain MPI. mpistrat bench all_reduce -n 4 starts four ranks; or start it on all ranks "
        "of a job: srun python -m mpistrat bench all_reduce."
    )
    parser.add_argument("collective", choices=("all_reduce",), help="the collective to benchmark")
    run.add_own_rank_options(parser)
    parser.add_argument("--min-bytes", default="8", metavar="SIZE", help="smallest array (default: 8)")
    parser.add_argument("--max-bytes", default="64MiB", metavar="SIZE", help="largest array (default: 64MiB)")
    parser.add_argument("--step-factor", type=int, default=4, metavar="N", help="factor from one size to the next (default: 4)")
    parser.add_argument("--algorithm", default="auto", choices=ALGORITHMS, help="default: auto; mpi: plain MPI")
    parser.add_argument(
        "--device", default="auto", choices=DEVICES, help="memory of the arrays: gpu, cpu, or auto (default: the ranks' device)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the bandwidths to FILE (needs matplotlib)")


def execute(arguments: argparse.Namespace) -> int:
    """Check all arguments, then start MPI, measure, print and write; return the exit code. A collective call.

    With -n, outside of a job, the ranks of a job of its own do that.

    Raises
    ------
    InvalidArgumentError
        If the sizes cannot be measured, a file cannot be written, or -n is not the number of ranks of this job.
    LaunchError
        If there is no MPI, or no matplotlib for a plot.
    """
    sizes = _sizes(arguments)
    _check_files(arguments)
    code = run.start_own_ranks(arguments)
    if code is not None:
        return code
    prefer(arguments.device)
    ops = communicator(start())
    if ops.rank == 0:
        print(f"all_reduce of float32, SUM, {ops.world}, {library_version()}; {place_text(ops)}", flush=True)
    _tabulate(arguments, ops, sizes)
    ops.close()
    return 0


def measure(ops: Communicator, nbytes: int, algorithm: str) -> Row:
    """Benchmark one size. A collective call.

    Raises
    ------
    CollectiveError
        On every rank, if a result is wrong.
    """
    comm = ops.hierarchy.world_group.comm
    count = nbytes // ITEM_BYTES
    in_host = np.full(count, ops.rank + 1, np.float32), np.empty(count, np.float32)
    source, target = filled(count, ops.rank + 1, ops), filled(count, 0, ops)

    def bare() -> None:
        comm.Allreduce(*in_host)

    ours, plan = (bare, "mpi") if algorithm == "mpi" else _ours(ops, source, target, algorithm)
    calls: list[Callable[[], object]] = [timed(ours, ops), bare]
    for call, result in zip(calls, (in_host[1] if algorithm == "mpi" else target, in_host[1]), strict=True):
        check_sum(comm, call, result)
    (seconds, mpi_seconds), rounds = time_interleaved(comm, calls)
    algorithm_gbs = nbytes / seconds / 1e9
    bus_gbs = algorithm_gbs * 2 * (ops.size - 1) / ops.size
    return Row(nbytes, plan, seconds, mpi_seconds, algorithm_gbs, bus_gbs, mpi_seconds / seconds, rounds)


def _tabulate(arguments: argparse.Namespace, ops: Communicator, sizes: list[int]) -> None:
    chief, rows = ops.rank == 0, []
    if chief:
        print(f"{'size':>10}  {'plan':<12}  {'time':>12}  {'MPI':>12}  {'alg GB/s':>9}  {'bus GB/s':>9}  {'x MPI':>6}")
    for nbytes in sizes:
        row = measure(ops, nbytes, arguments.algorithm)
        rows.append(row)
        if chief:
            times = f"{row.seconds * 1e6:9.1f} µs  {row.mpi_seconds * 1e6:9.1f} µs"
            rates = f"{row.algorithm_gbs:9.3f}  {row.bus_gbs:9.3f}  {row.ratio:6.2f}"
            print(f"{format_bytes(row.nbytes):>10}  {row.plan:<12}  {times}  {rates}", flush=True)
    if chief and arguments.json:
        _write_json(arguments.json, ops, rows)
    if chief and arguments.plot:
        _write_plot(arguments.plot, ops, rows)


def _ours(ops: Communicator, source: Array, target: Array, algorithm: str) -> tuple[Callable[[], object], str]:
    # auto is the default of a call without options
    options = None if algorithm == "auto" else CommunicationOptions(algorithm=algorithm)
    plan = ops.choose(source.size, source.dtype, options).plan
    return lambda: ops.all_reduce(ReduceOp.SUM, [source], options, [target]), plan.algorithm


def _sizes(arguments: argparse.Namespace) -> list[int]:
    try:
        first, last = parse_bytes(arguments.min_bytes), parse_bytes(arguments.max_bytes)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    if not ITEM_BYTES <= first <= last or first % ITEM_BYTES or arguments.step_factor < 2:
        raise InvalidArgumentError(
            f"sizes from {first} to {last} bytes by a factor of {arguments.step_factor} cannot be measured: accepted are "
            f"multiples of {ITEM_BYTES} bytes, --min-bytes not above --max-bytes, and --step-factor of at least 2"
        )
    sizes = [first]
    while sizes[-1] * arguments.step_factor <= last:
        sizes.append(sizes[-1] * arguments.step_factor)
    return sizes


def _check_files(arguments: argparse.Namespace) -> None:
    """Check on every rank, though only one writes: if that one alone failed, the others would wait for it in MPI."""
    for option, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        obstacle = _obstacle(path) if path else ""
        if obstacle:
            raise InvalidArgumentError(f"{option} {path} cannot be written: {obstacle}")
    if arguments.plot:
        _check_plot(arguments.plot)


def _obstacle(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent.absolute()}"
    if path.is_dir():
        return "it is a folder; name a file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"permission denied to {'change it' if path.exists() else f'write to {path.parent.absolute()}'}"
    return ""


def _check_plot(path: Path) -> None:
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise LaunchError(
            f"--plot needs matplotlib ({error}): pip install '.[demo]' in the checkout, or leave out --plot"
        ) from None
    known = sorted(f".{kind}" for kind in FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower() not in known:
        raise InvalidArgumentError(
            f"--plot {path} has an unknown file type; accepted are names that end with {', '.join(known)}"
        )


def _write_json(path: Path, ops: Communicator, rows: list[Row]) -> None:
    document = {
        "collective": "all_reduce",
        "dtype": "float32",
        "mpistrat": mpistrat.__version__,
        "mpi": library_version(),
        "python": platform.python_version(),
        "world": ops.world.shape,
        "ranks": ops.size,
        "arrays": place_text(ops),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _write_plot(path: Path, ops: Communicator, rows: list[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sizes = [row.nbytes for row in rows]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(sizes, [row.bus_gbs for row in rows], "o-", label="mpistrat")
    axes.plot(sizes, [row.bus_gbs / row.ratio for row in rows], "s--", label="MPI_Allreduce")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_title(f"all_reduce, {ops.world}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
