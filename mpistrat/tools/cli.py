"""mpistrat: the command line, one row per command."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import mpistrat
from mpistrat.errors import CollectiveError, MpistratError
from mpistrat.launch.abort import HEAD_START_SECONDS, HEAD_START_SECONDS_RAISED_EVERYWHERE
from mpistrat.launch.environment import detect

COMMANDS = {
    "run": "start a script on several ranks, with the right mpiexec for this machine",
    "demo": "train a small network on four ranks, and show topology, plan and throughput",
    "plan": "show how an all-reduce would run on any number of nodes and ranks; needs no MPI",
    "bench": "benchmark collectives against plain MPI, on ranks of its own or of a job",
    "checkpoint": "list checkpoints, show what one holds, or verify its checksums",
    "doctor": "show what each rank of a job on this host is doing, and which rank waits for which",
    "info": "show versions, the MPI library that is found, GPUs and settings; does not start MPI",
    "tune": "benchmark this cluster and cache the results for auto, on ranks of its own or of a job",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default with the arguments of this process, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_main = threading.current_thread() is threading.main_thread()  # the only one that may set handlers
    has_default = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if has_default:  # while modules are imported Ctrl-C kills: NumPy's would turn a KeyboardInterrupt into an ImportError
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        parser = make_parser(words[0] if words else "")
    finally:
        if has_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = parser.parse_args(words, argparse.Namespace(words=words))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: no µ ends a measurement where all is ASCII
    try:
        code: int = importlib.import_module(f"mpistrat.tools.{arguments.command}").execute(arguments)
        if sys.stdout is not None:  # it was closed before Python started
            sys.stdout.flush()  # so that a closed pipe is noticed here, not when the interpreter exits
    except BrokenPipeError:
        view = detect()
        if view is not None and view.size != 1:
            raise  # other ranks may wait for this one: an exception ends the job
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # to which Python writes at exit what is left
        return 128 + signal.SIGPIPE  # as of a process that it has killed
    except MpistratError as error:
        if isinstance(error, CollectiveError) and error.raised_everywhere:
            raise  # by a call, whose line is to be seen
        is_first = (view := detect()) is None or not view.rank
        if not is_first:  # all may raise the same: rank 0 has time to say it, and to end the job
            time.sleep(HEAD_START_SECONDS_RAISED_EVERYWHERE if error.raised_everywhere else HEAD_START_SECONDS)
        if is_first or not error.raised_everywhere:
            print(f"mpistrat {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def make_parser(needed: str = "*") -> argparse.ArgumentParser:
    """Return the parser of all commands; only the module of the command `needed` is imported, by default of all."""
    parser = argparse.ArgumentParser("mpistrat", description=mpistrat.__doc__.split("\n")[0] if mpistrat.__doc__ else "")
    parser.add_argument("--version", action="version", version=f"mpistrat {mpistrat.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, meaning in COMMANDS.items():
        command = commands.add_parser(name, help=meaning, description=meaning)
        if needed in (name, "*"):
            importlib.import_module(f"mpistrat.tools.{name}").add_arguments(command)
    return parser
