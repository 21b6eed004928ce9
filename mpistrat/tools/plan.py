"""mpistrat plan: what would be done on a world of any shape, what it would cost, and why. Needs no MPI."""

from __future__ import annotations

import argparse
import sys

import ml_dtypes
import numpy as np

from mpistrat.algorithms.choose import PLANNERS, Candidate, Choice, choose
from mpistrat.algorithms.cost import DEFAULT, link_bytes, phase_bytes, phase_seconds, predict_seconds
from mpistrat.algorithms.plan import Plan, Scope
from mpistrat.errors import InvalidArgumentError, MpistratError, UnsupportedDtypeError
from mpistrat.settings import parse_bytes
from mpistrat.text import format_bytes, format_count, format_seconds, format_table
from mpistrat.topology.world import World

__all__ = ["add_arguments", "execute"]

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_INEXACT = ("float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128")
_DTYPES = {dtype.name: dtype for dtype in map(np.dtype, ("bool", *_INTEGERS, *_INEXACT))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``mpistrat plan`` takes."""
    parser.description = "Show the phases of an all-reduce on a world of any shape, their bytes and predicted times, and why."
    parser.add_argument("--world", required=True, metavar="SHAPE", help="nodes and ranks: 4x8, 3+1 or 2x2:cyclic")
    parser.add_argument("--bytes", required=True, metavar="SIZE", help="size of the buffer: 64MiB, 1.5KiB or 8")
    parser.add_argument("--dtype", default="float32", metavar="NAME", help="type of its elements (default: float32)")
    parser.add_argument("--algorithm", default="auto", metavar="NAME", help=f"auto (default), {', '.join(PLANNERS)}")
    parser.add_argument("--chunk-bytes", default="0", metavar="SIZE", help="largest chunk of a pipelined plan; 0: by rule")


def execute(arguments: argparse.Namespace) -> int:
    """Print the plan, and return the exit code: 2 where an argument cannot be used."""
    try:
        world, itemsize = World.from_shape(arguments.world), _itemsize(arguments.dtype)
        num_bytes, chunk_bytes = parse_bytes(arguments.bytes), parse_bytes(arguments.chunk_bytes)
        if num_bytes % itemsize:
            raise InvalidArgumentError(
                f"{num_bytes} bytes are no whole number of {arguments.dtype} elements; pass --bytes as a multiple of {itemsize}"
            )
        choice = choose(world, num_bytes // itemsize, itemsize, arguments.algorithm, chunk_bytes)
    except (MpistratError, ValueError) as error:
        print(f"mpistrat plan: {error}", file=sys.stderr)
        return 2
    print(_report(choice, arguments.world, arguments.dtype))
    return 0


def _itemsize(name: str) -> int:
    if name not in _DTYPES:
        raise UnsupportedDtypeError(f"unknown dtype {name!r}; accepted are {', '.join(_DTYPES)}")
    return _DTYPES[name].itemsize


def _report(choice: Choice, shape: str, dtype: str) -> str:
    heading = [
        ("world", f"{shape}: {_size(choice.plan.world)}"),
        ("buffer", f"{format_bytes(choice.plan.num_bytes)} of {dtype}: {_pieces(choice.plan)}"),
        ("algorithm", choice.plan.algorithm),
        ("why", choice.reason),
    ]
    basis = (
        f"Predicted for {DEFAULT.link_bytes_per_second / 1e9:g} GB/s per node link and "
        f"{DEFAULT.memory_bytes_per_second / 1e9:g} GB/s of memory per rank; mpistrat bench measures."
    )
    return "\n\n".join([format_table(heading), _phases(choice.plan), _alternatives(choice), basis])


def _size(world: World) -> str:
    counts = ((world.size, "rank"), (world.num_nodes, "node"), (world.num_shards, "shard"))
    return ", ".join(format_count(count, noun) for count, noun in counts)


def _pieces(plan: Plan) -> str:
    elements = format_count(plan.count, "element")
    if plan.num_chunks < 2:
        return elements
    chunk_bytes = format_bytes(plan.chunk_count * plan.itemsize)
    return f"{elements} in {plan.num_chunks} chunks of {chunk_bytes}, {plan.depth} at a time"


def _phases(plan: Plan) -> str:
    rows = [("phase", "sent per rank", "per node link", "predicted")]
    for phase in plan.phases:
        sent, link = format_bytes(phase_bytes(plan, phase)), format_bytes(link_bytes(plan, phase))
        # what MPI sends is its own affair: the least possible is known, not the truth
        least = "at least " if phase.scope is Scope.WORLD and plan.world.num_nodes > 1 else ""
        rows.append((str(phase), sent, least + link, format_seconds(phase_seconds(plan, phase))))
    overlapped = plan.depth > 1 and len({phase.scope for phase in plan.phases}) > 1
    rows.append(("all, overlapped" if overlapped else "all", "", "", format_seconds(predict_seconds(plan))))
    return format_table(rows, right=(1, 2, 3))


def _alternatives(choice: Choice) -> str:
    rows = [_alternative(candidate, choice.plan) for candidate in choice.considered]
    return format_table([("alternative", "predicted", ""), *rows])


def _alternative(candidate: Candidate, chosen: Plan) -> tuple[str, str, str]:
    if candidate.plan is None:
        return candidate.algorithm, "declines", candidate.declined
    return candidate.algorithm, format_seconds(candidate.seconds), "chosen" if candidate.plan == chosen else ""
