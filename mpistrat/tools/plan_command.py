"""mpistrat plan: the plan of an all-reduce on nodes of any shape, its predicted time, and why. Needs no MPI."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mpistrat import cache, settings
from mpistrat.algorithms.choose import PLANNERS, Choice, choose
from mpistrat.algorithms.chunks import DEVICE_CHUNK_BYTES
from mpistrat.algorithms.cost import DEFAULT, ON_DEVICE, CostModel
from mpistrat.algorithms.plan_report import alternatives_text, basis_text, choice_document, chunks_text, phases_text
from mpistrat.errors import InvalidArgumentError, MpistratError, UnsupportedDtypeError
from mpistrat.settings import parse_bytes
from mpistrat.text import format_bytes, format_count, format_table
from mpistrat.topology.world import World
from mpistrat.tuning.model import Tuning

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_INEXACT = ("float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128")
_DTYPES = {dtype.name: dtype for dtype in map(np.dtype, ("bool", *_INTEGERS, *_INEXACT))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mpistrat plan``."""
    parser.description = (
        "Show how an all-reduce would run on any number of nodes and ranks: algorithm, phases, their bytes and predicted times."
    )
    parser.add_argument("--world", required=True, metavar="SHAPE", help="nodes and ranks: 4x8, 3+1 or 2x2:cyclic")
    parser.add_argument("--bytes", required=True, metavar="SIZE", help="size of the buffer: 64MiB, 1.5KiB or 8")
    parser.add_argument("--dtype", default="float32", metavar="NAME", help="type of its elements (default: float32)")
    parser.add_argument("--algorithm", default="auto", metavar="NAME", help=f"auto (default), {', '.join(PLANNERS)}")
    parser.add_argument(
        "--chunk-bytes", default="0", metavar="SIZE", help="chunks of a hierarchical plan; 0: chosen by the planner"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        choices=("cpu", "gpu"),
        help="memory of the buffer (default: cpu); with gpu the transports are shown too",
    )
    parser.add_argument("--links", type=int, metavar="N", help="network links of a node, used at the same time (default: 1)")
    parser.add_argument("--tuning", type=Path, metavar="FILE", help="predict by the measurements of mpistrat tune in FILE")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Print the plan, and return the exit code: 2 if an argument is invalid."""
    try:
        world, itemsize = World.from_shape(arguments.world), _itemsize(arguments.dtype)
        num_bytes, chunk_bytes = parse_bytes(arguments.bytes), parse_bytes(arguments.chunk_bytes)
        if num_bytes % itemsize:
            raise InvalidArgumentError(
                f"{num_bytes} bytes are not a whole number of {arguments.dtype} elements; --bytes must be a multiple of "
                f"{itemsize}"
            )
        on_gpu = arguments.device == "gpu"
        if on_gpu and arguments.tuning:
            raise InvalidArgumentError("--device gpu cannot be combined with --tuning, which is for host memory")
        model = ON_DEVICE if on_gpu else _model(arguments.tuning, world)
        if arguments.links is not None:
            model = _with_links(model, arguments.links)
        choice = choose(
            world,
            num_bytes // itemsize,
            itemsize,
            arguments.algorithm,
            chunk_bytes,
            model,
            one_intra_phase=on_gpu,
            default_chunk_bytes=DEVICE_CHUNK_BYTES * on_gpu,
        )
        report = _document if arguments.json else _report
        text = report(choice, arguments.world, arguments.dtype, model, paths_text(world) if on_gpu else "")
    except (MpistratError, ValueError, OSError) as error:
        print(f"mpistrat plan: {error}", file=sys.stderr)
        return 2
    print(text)  # outside of the try: a closed pipe is not an invalid argument
    return 0


def _itemsize(name: str) -> int:
    if name not in _DTYPES:
        raise UnsupportedDtypeError(f"unknown dtype {name!r}; accepted are {', '.join(_DTYPES)}")
    return _DTYPES[name].itemsize


def _model(path: Path | None, world: World) -> CostModel:
    """Return the model of a tuning file, if it was measured on this world."""
    if path is None:
        return DEFAULT
    try:
        tuning = Tuning.from_document(cache.read(path))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"--tuning {path} cannot be used: {error}") from None
    if tuning.conditions.world == f"{world.shape} {world.placement}":
        return tuning.model(str(path))
    raise InvalidArgumentError(f"--tuning {path} was measured on {tuning.conditions.world}, and says nothing of other worlds")


def _with_links(model: CostModel, links: int) -> CostModel:
    if links < 1:
        raise InvalidArgumentError(f"--links must be at least 1; got {links}")
    return replace(model, links=links)


def _report(choice: Choice, shape: str, dtype: str, model: CostModel, paths: str) -> str:
    heading = [
        ("world", f"{shape}: {_size(choice.plan.world)}"),
        ("buffer", f"{format_bytes(choice.plan.num_bytes)} of {dtype}: {chunks_text(choice.plan)}"),
        ("algorithm", choice.plan.algorithm),
        ("why", choice.reason),
    ]
    parts = [format_table(heading), phases_text(choice.plan, model), alternatives_text(choice), basis_text(model)]
    return "\n\n".join([*parts, paths] if paths else parts)


def _document(choice: Choice, shape: str, dtype: str, model: CostModel, paths: str) -> str:
    world = choice.plan.world
    document: dict[str, Any] = {
        "world": shape,
        "ranks": world.size,
        "nodes": world.num_nodes,
        "shards": world.num_shards,
        "bytes": choice.plan.num_bytes,
        "dtype": dtype,
        **choice_document(choice, model),
    }
    return json.dumps(document | {"ways": paths.splitlines()} if paths else document, indent=1)


def _size(world: World) -> str:
    counts = ((world.size, "rank"), (world.num_nodes, "node"), (world.num_shards, "shard"))
    return ", ".join(format_count(count, noun) for count, noun in counts)


def paths_text(world: World) -> str:
    """Return a table of the transports inside nodes and between them, and why."""
    return format_table([("inside nodes", _inside(world)), *(("between nodes", text) for text in _between(world))])


def _inside(world: World) -> str:
    wanted = settings.INTRA_TRANSPORT.read()
    if world.num_shards == 1:
        return "nothing: each node has one rank"
    if wanted != "auto":
        return f"{wanted}: set by {settings.INTRA_TRANSPORT.name}"
    return "nccl where the ranks of a node can use it, else cuda_ipc, else staged"


def _between(world: World) -> list[str]:
    inter, mpi_gpu = settings.INTER_TRANSPORT.read(), settings.MPI_GPU.read()
    if world.num_nodes == 1:
        return ["nothing: there is one node"]
    if inter == "nccl":
        return [
            f"nccl: set by {settings.INTER_TRANSPORT.name}; auto is one call of NCCL for all ranks, whose time is not predicted"
        ]
    if inter != "auto":
        return [f"staged over {inter}: set by {settings.INTER_TRANSPORT.name}"]
    if mpi_gpu != "auto":
        return [f"{_transport(mpi_gpu == 'on')}: {settings.MPI_GPU.name}={mpi_gpu}"]
    return [f"{_transport(True)} if MPI is CUDA-aware, else {_transport(False)}: each job on GPUs finds out"]


def _transport(is_aware: bool) -> str:
    return "cuda_aware" if is_aware else "staged over mpi_ring"
