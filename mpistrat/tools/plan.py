"""mpistrat plan: the plan of an all-reduce of host memory on nodes of any shape, and why. Needs no MPI."""

from __future__ import annotations

import argparse

import ml_dtypes
import numpy as np

from mpistrat.algorithms.plan import chunks_text, phases_text
from mpistrat.algorithms.planners import PLANNERS, Choice, choose
from mpistrat.errors import InvalidArgumentError
from mpistrat.settings import parse_bytes
from mpistrat.text import format_bytes, format_count, format_table
from mpistrat.topology.world import World

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_INEXACT = ("float16", ml_dtypes.bfloat16, "float32", "float64", "complex64", "complex128")
_MOST_BYTES = 2**40  # a plan lists its chunks
_DTYPES = {dtype.name: dtype for dtype in map(np.dtype, ("bool", *_INTEGERS, *_INEXACT))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show how an all-reduce would run on any number of nodes and ranks: algorithm, phases, and bytes."
    parser.add_argument("--world", required=True, metavar="SHAPE", help="nodes and ranks: 4x8, 3+1 or 2x2:cyclic")
    parser.add_argument("--bytes", required=True, metavar="SIZE", help="size of the buffer: 64MiB, 1.5KiB or 8")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", metavar="NAME", help="element type (default: float32)")
    names = ("auto", *PLANNERS)
    parser.add_argument("--algorithm", choices=names, default="auto", metavar="NAME", help=f"{', '.join(names)}; default: auto")


def execute(arguments: argparse.Namespace) -> int:
    world = World.from_shape(arguments.world)
    itemsize = _DTYPES[arguments.dtype].itemsize
    num_bytes = parse_bytes(arguments.bytes)
    if num_bytes > _MOST_BYTES:
        raise InvalidArgumentError(f"--bytes {arguments.bytes} are too many: up to {format_bytes(_MOST_BYTES)} are accepted")
    if num_bytes % itemsize:
        raise InvalidArgumentError(
            f"{num_bytes} bytes are not a whole number of {arguments.dtype} elements; --bytes must be a multiple of {itemsize}"
        )
    choice = choose(world, num_bytes // itemsize, itemsize, arguments.algorithm)
    print(_report(choice, arguments.world, arguments.dtype))
    return 0


def _report(choice: Choice, shape: str, dtype: str) -> str:
    world = choice.plan.world
    counts = ((world.size, "rank"), (world.num_nodes, "node"), (world.num_shards, "shard"))
    heading = [
        ("world", f"{shape}: {', '.join(format_count(*each) for each in counts)}"),
        ("buffer", f"{format_bytes(choice.plan.num_bytes)} of {dtype}: {chunks_text(choice.plan)}"),
        ("algorithm", choice.plan.algorithm),
        ("why", choice.reason),
    ]
    return "\n\n".join([format_table(heading), phases_text(choice.plan)])
