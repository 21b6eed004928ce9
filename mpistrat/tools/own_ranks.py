"""Commands that start the ranks which they run on, or run on those of a job: the options -n and --nodes of bench and tune."""

from __future__ import annotations

import argparse

from mpistrat import settings
from mpistrat.errors import InvalidArgumentError
from mpistrat.launch import environment
from mpistrat.text import format_count
from mpistrat.tools import run

__all__ = ["add_arguments", "start_own_ranks"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare -n and --nodes."""
    run.add_rank_options(
        parser,
        ranks="start this many ranks; in a job that mpiexec or srun has started, its ranks run the command",
        nodes="treat them as virtual nodes: 2x2, 3+1, 2x2:cyclic",
    )


def start_own_ranks(arguments: argparse.Namespace) -> int | None:
    """Run the same command on the ranks that -n and --nodes ask for, and return its exit code.

    Parameters
    ----------
    arguments : Namespace
        With ``ranks`` and ``nodes``, and ``words``: the command as it was typed.

    Returns
    -------
    int or None
        None if nothing was started: there is neither option, or this process is one of these ranks.

    Raises
    ------
    InvalidArgumentError
        If the number is less than 1, or this process is a rank of another job than the one that is asked for.
    TopologyError
        If the node shape is malformed or has another number of ranks.
    LaunchError
        If there is no MPI.
    """
    if arguments.ranks is None and not arguments.nodes:
        return None
    num_ranks = run.count_ranks(arguments.ranks, arguments.nodes)
    view = environment.detect()
    if view is None:
        return run.start(["-m", "mpistrat", *arguments.words], num_ranks, arguments.nodes)
    if view.size != num_ranks:
        raise InvalidArgumentError(
            f"{format_count(num_ranks, 'rank')} are asked for inside a job of {view.size}, which {view.launcher} has started: "
            "leave out -n and --nodes there"
        )
    if arguments.nodes and arguments.nodes != settings.VIRTUAL_NODES.read():
        raise InvalidArgumentError(
            f"--nodes {arguments.nodes} inside a job: {settings.VIRTUAL_NODES.name} says it there, set before the job starts"
        )
    return None
