"""``mpistrat run``: start a script on N ranks, with the right mpiexec and options for this machine."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpistrat import settings
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.launch import environment, mpiexec, openmpi
from mpistrat.launch.abort import RESTART_EXIT_CODE
from mpistrat.launch.end_of_job import run_again
from mpistrat.launch.mpiexec import Ended, Killed, follow
from mpistrat.text import format_count, format_elapsed
from mpistrat.topology.world import World


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mpistrat run [-n N] [option ...] (script.py | -m module) [argument ...]"
    add_rank_options(
        parser,
        ranks="number of ranks (default: as many as --nodes has)",
        nodes="treat the ranks as virtual nodes: 2x2, 3+1, 2x2:cyclic",
    )
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="start ranks on the hosts in FILE, as mpiexec reads it")
    parser.add_argument("--tag-output", action="store_true", help="put the rank before each line that it prints")
    parser.add_argument("--timeout", metavar="TIME", help="end the job with code 124 after so long: 90 (seconds), 10m, 2:00:00")
    again = "start a job that fails up to N times again, while it makes progress"
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help=again)
    parser.add_argument("--restart-delay", default="3", metavar="TIME", help="how long to wait before that (default: 3 s)")
    parser.add_argument("--survive", action="store_true", help="go on without workers that are lost, with parameter servers")
    parser.add_argument("--dry-run", action="store_true", help="print the command and start nothing")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, default=[], help="run a module instead of a script")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="the script and its arguments")


def add_rank_options(parser: argparse.ArgumentParser, ranks: str, nodes: str) -> None:
    """Declare -n, which mpiexec also spells -np, and --nodes, with what they mean for a command."""
    parser.add_argument("-n", "-np", "--ranks", type=int, metavar="N", help=ranks)
    parser.add_argument("--nodes", default="", metavar="SHAPE", help=nodes)


def add_own_rank_options(parser: argparse.ArgumentParser) -> None:
    """Declare -n and --nodes of a command that starts the ranks which it runs on, or runs on those of a job."""
    add_rank_options(
        parser,
        ranks="start this many ranks; in a job that mpiexec or srun has started, its ranks run the command",
        nodes="treat them as virtual nodes: 2x2, 3+1, 2x2:cyclic",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Start the job, or print its command; return the exit code."""
    program = ["-m", *arguments.module] if arguments.module else arguments.program
    program = program[1:] if program[:1] == ["--"] else program  # the usual end of the options
    _check_program(program)
    if arguments.hostfile is not None and not arguments.hostfile.is_file():
        raise InvalidArgumentError(f"--hostfile {arguments.hostfile} is no file; accepted is one with a line for each host")
    num_ranks = _count_ranks(arguments.ranks, arguments.nodes)
    timeout = _seconds("--timeout", arguments.timeout) if arguments.timeout else math.inf
    if not timeout:
        raise InvalidArgumentError("--timeout 0 would end the job at once; without --timeout it has no limit")
    if arguments.max_restarts < 0:
        raise InvalidArgumentError(f"--max-restarts {arguments.max_restarts} is negative")
    delay = _seconds("--restart-delay", arguments.restart_delay)
    command = partial(
        _command,
        program,
        num_ranks,
        arguments.nodes,
        survive=arguments.survive,
        tag_output=arguments.tag_output,
        hostfile=arguments.hostfile,
    )
    if arguments.dry_run:
        argv, extra = command()
        print(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in extra.items()), shlex.join(argv)]))
        return 0
    if not arguments.max_restarts:
        return _follow(*command(), timeout)[0].code

    def start(variables: Mapping[str, str]) -> tuple[Ended, str]:
        return _follow(*command(variables=variables), timeout)

    several_hosts = arguments.hostfile is not None or environment.in_slurm_allocation(os.environ)
    shared = Path.cwd() if several_hosts and os.access(Path.cwd(), os.W_OK) else None
    return run_again(start, arguments.max_restarts, delay, shared, _say)


def start(program: Sequence[str], num_ranks: int, nodes: str = "", variables: Mapping[str, str] | None = None) -> int:
    """Start a job, wait for its end, and return its exit code, as `follow` does; its ranks see `variables` too."""
    return _follow(*_command(program, num_ranks, nodes, variables=variables))[0].code


def _follow(command: Sequence[str], extra: Mapping[str, str], timeout: float = math.inf) -> tuple[Ended, str]:
    """Run a job, report what was killed or took too long, and return how it has ended, and a text that says why."""
    ended = follow(command, {**os.environ, **extra}, timeout, partial(_report_timeout, timeout))
    if ended.timed_out:
        return ended, f"the job has taken {format_elapsed(timeout)}"
    if ended.killed is not None:
        return ended, _report_killed(ended.killed)
    if ended.code == RESTART_EXIT_CODE:
        return ended, "the job was preempted"
    return ended, f"{ended.failed or 'the job'} ended with code {ended.code}"


def _command(
    program: Sequence[str],
    num_ranks: int,
    nodes: str,
    hostfile: Path | None = None,
    variables: Mapping[str, str] | None = None,
    **options: Any,
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a job, and the variables to add to its environment."""
    view = environment.detect()
    if view is not None and view.has_peers:
        raise LaunchError(
            f"this is rank {view.rank} of {view.size or 'several'} that {view.launcher} started, and each rank would start a "
            "job. Call mpistrat once, outside the job; or leave it out, and start the script with that launcher."
        )
    # with python -m mpi4py, a rank that fails before it has made a strategy ends the others (afterwards `launch.abort` does)
    python = [sys.executable, *(["-m", "mpi4py"] if num_ranks > 1 else []), *program]
    given = {**(variables or {})}
    command, extra = mpiexec.command(num_ranks, python, nodes, hostfile=hostfile, environ={**os.environ, **given}, **options)
    if hostfile is None and not environment.in_slurm_allocation(os.environ):
        extra |= _share_of_cores(num_ranks)
    return command, given | extra


def _check_program(program: Sequence[str]) -> None:
    """Check that a script or module is named, and exists. A folder with ``__main__.py`` is a script too."""
    if not any(program[1:2] if program[:1] == ["-m"] else program[:1]):
        raise InvalidArgumentError("the program is missing: a script, or -m and a module, after the options")
    script = Path(program[0])
    if program[0] != "-m" and not (script / "__main__.py" if script.is_dir() else script).exists():
        raise InvalidArgumentError(f"there is no script {program[0]!r} in {Path.cwd()}")
    top = program[1].partition(".")[0] if program[0] == "-m" else ""
    if top and PathFinder.find_spec(top, [str(Path.cwd())]) is None and find_spec(top) is None:
        raise InvalidArgumentError(f"there is no module {top!r} in {Path.cwd()}, nor is one installed")


def _count_ranks(ranks: int | None, nodes: str) -> int:
    """Return the number of ranks that -n and --nodes ask for."""
    if ranks is None and not nodes:
        raise InvalidArgumentError("the number of ranks is missing: -n N, or --nodes SHAPE for virtual nodes")
    if ranks is not None and not 1 <= ranks <= environment.MOST_RANKS:
        raise InvalidArgumentError(f"-n {ranks}: a job has from 1 to {environment.MOST_RANKS} ranks")
    if not nodes:
        assert ranks is not None, "either is given"
        return ranks
    return World.from_shape(nodes, ranks).size


def start_own_ranks(arguments: argparse.Namespace) -> int | None:
    """Run this command on the ranks that -n and --nodes ask for; return its code, or None without them, or on these ranks."""
    if arguments.ranks is None and not arguments.nodes:
        return None
    num_ranks = _count_ranks(arguments.ranks, arguments.nodes)
    view = environment.detect()
    if view is None:
        return start(["-m", "mpistrat", *arguments.words], num_ranks, arguments.nodes)
    if view.size != num_ranks:
        raise InvalidArgumentError(
            f"{format_count(num_ranks, 'rank')} are asked for inside a job of {view.size}, which {view.launcher} has started: "
            "leave out -n and --nodes there"
        )
    if arguments.nodes and arguments.nodes != settings.VIRTUAL_NODES.read():
        raise InvalidArgumentError(f"--nodes {arguments.nodes} in a job: set {settings.VIRTUAL_NODES.name} before it starts")
    return None


def _share_of_cores(num_ranks: int) -> dict[str, str]:
    """Return the variable that limits the threads of a rank, unless it is set: NumPy would start one for each core."""
    if "OMP_NUM_THREADS" in os.environ or num_ranks == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, openmpi.num_cores() // num_ranks))}


def _seconds(option: str, text: str) -> float:
    try:
        return settings.parse_duration(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{option} {error}") from None


def _report_timeout(seconds: float, mpiexec_pid: int) -> None:
    from mpistrat.tools import doctor  # takes 60 ms, and few jobs need it

    report = doctor.describe(mpiexec_pid) or "What its ranks were doing is not known: none on this host has made a strategy."
    _say(f"the job has taken {format_elapsed(seconds)}, its --timeout, and is ended\n{report}")


def _report_killed(killed: Killed) -> str:
    """Say which process was killed, and return it without the advice."""
    from mpistrat.watch.record import mark_killed  # as above

    found = mark_killed(killed.pid) if killed.node.partition(".")[0] == socket.gethostname().partition(".")[0] else None
    who, advice = f"process {killed.pid} on {killed.node}", ""
    if found is not None:
        who = f"rank {found[0]} on {killed.node} (process {killed.pid})"
        advice = f". What each rank was doing: mpistrat doctor {found[1]}"
    name = signal.strsignal(killed.number) or "unknown"
    memory = "; the system does that to processes when memory runs out" if killed.number == signal.SIGKILL else ""
    _say(f"{who} was ended by signal {killed.number} ({name}{memory}), and the other ranks with it{advice}")
    return f"{who} was ended by signal {killed.number}"


def _say(text: str) -> None:
    print(f"mpistrat run: {text}", file=sys.stderr, flush=True)
