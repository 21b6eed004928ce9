"""``mpistrat run``: start a script on N ranks, with the mpiexec and the options that fit this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.launch import environment, mpiexec
from mpistrat.topology.world import World

__all__ = ["add_arguments", "execute"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.usage = "mpistrat run [-n N] [--nodes SHAPE] [--dry-run] (script.py | -m module) [argument ...]"
    parser.add_argument("-n", "--ranks", type=int, metavar="N", help="how many ranks; as many as --nodes has by default")
    parser.add_argument("--nodes", default="", metavar="SHAPE", help="pretend these nodes: 2x2, 3+1, 2x2:cyclic")
    parser.add_argument("--dry-run", action="store_true", help="print the command and start nothing")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, default=[], help="run a module instead of a script")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the script and its arguments")


def execute(arguments: argparse.Namespace) -> int:
    """Start the job in place of this process, so that its signals, Ctrl-C and exit code are mpiexec's own.

    Returns
    -------
    int
        0 after a dry run; otherwise it does not return.

    Raises
    ------
    InvalidArgumentError
        If there is no script, or no number of ranks.
    TopologyError
        If the node shape is malformed or is not one of N ranks.
    LaunchError
        If there is no MPI, or this process is one of several ranks itself.
    """
    program = ["-m", *arguments.module] if arguments.module else arguments.program
    _check_program(program)
    _check_alone()
    num_ranks = _num_ranks(arguments.ranks, arguments.nodes)
    # python -m mpi4py: a rank that ends with sys.exit(1) ends the job, too (see launch.abort)
    python = [sys.executable, "-m", "mpi4py", *program]
    command, extra_environ = mpiexec.command(num_ranks, python, arguments.nodes)
    if not arguments.dry_run:
        os.execve(command[0], command, {**os.environ, **extra_environ})
    print(_as_shell_line(command, extra_environ))
    return 0


def _num_ranks(ranks: int | None, nodes: str) -> int:
    if ranks is None and not nodes:
        raise InvalidArgumentError("mpistrat run needs the number of ranks, -n N, or the nodes to pretend, --nodes SHAPE")
    if ranks is not None and ranks < 1:
        raise InvalidArgumentError(f"mpistrat run -n {ranks}: a job needs at least 1 rank")
    if not nodes:
        assert ranks is not None, "either is given"
        return ranks
    return World.from_shape(nodes, ranks).size


def _check_program(program: list[str]) -> None:
    if not program:
        raise InvalidArgumentError("mpistrat run needs a script, or -m and a module, behind its options")
    if program[0] != "-m" and not Path(program[0]).exists():
        raise InvalidArgumentError(f"mpistrat run: there is no script {program[0]!r} in {Path.cwd()}")


def _check_alone() -> None:
    view = environment.detect()
    if view is not None and (view.size or 1) > 1:
        raise LaunchError(
            f"mpistrat run is rank {view.rank} of {view.size} that {view.launcher} started, and would start a job from each. "
            "Call it once, outside the job; or leave it out, and let the launcher that is there start the script."
        )


def _as_shell_line(command: list[str], extra_environ: dict[str, str]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in extra_environ.items()), shlex.join(command)])
