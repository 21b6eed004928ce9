"""Run mpiexec and wait for it: signals are forwarded to it, and its exit code is made reliable."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from mpistrat.launch import openmpi

__all__ = ["follow"]

INTERRUPTED = 128 + signal.SIGINT

# signals to forward to mpiexec; the terminal sends some of them to both processes
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# how long to wait for mpiexec to end by itself before a signal is forwarded: the terminal may have sent it to mpiexec too
_FORWARD_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def follow(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command, forward signals to it, and return its exit code, or 130 after Ctrl-C, whatever code it exits with.

    If this process is killed, the command gets SIGTERM.

    Parameters
    ----------
    argv : sequence of str
        The command.
    environ : mapping
        Its whole environment.
    """
    # under nohup, or in the background of a shell, some of them are ignored
    signals = [signal.SIGCHLD, *(number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    library = ctypes.CDLL(None)

    def begin() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # refers to the forking thread, which is the one that waits
        openmpi.remove_rendezvous_files(os.getpid(), environ)  # this process will become mpiexec
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    process = subprocess.Popen(list(argv), env=dict(environ), preexec_fn=begin)
    waiting: list[int] = []
    was_interrupted = False
    while process.poll() is None:
        received = signal.sigtimedwait(signals, _FORWARD_SECONDS) if waiting else signal.sigwaitinfo(signals)
        if received is None:  # the signal was sent to this process alone
            for number in waiting:
                process.send_signal(number)
            waiting.clear()
        elif received.si_signo != signal.SIGCHLD:
            waiting.append(received.si_signo)
            was_interrupted |= received.si_signo == signal.SIGINT
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if was_interrupted and process.returncode != 0:
        print("mpistrat run: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
