"""Run mpiexec to its end, as if it had been started in place of this process, but with an exit code that can be relied on."""

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

# what mpiexec is to hear of; the terminal sends some of it to both
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# how long mpiexec may take to end by a signal that the terminal has sent to it as well
_PATIENCE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def follow(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command, pass signals on to it, and return its exit code: 130 where Ctrl-C ended it, whatever it says itself.

    If this process is killed, the command is told to end.

    Parameters
    ----------
    argv : sequence of str
        The command.
    environ : mapping
        Its whole environment.
    """
    # nohup, or a shell that runs this in the background, has some of them ignored
    signals = [signal.SIGCHLD, *(number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    library = ctypes.CDLL(None)

    def begin() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # this thread, which forks, is the one that waits
        openmpi.remove_rendezvous_files(os.getpid(), environ)  # this process becomes mpiexec
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    process = subprocess.Popen(list(argv), env=dict(environ), preexec_fn=begin)
    waiting: list[int] = []
    was_interrupted = False
    while process.poll() is None:
        came = signal.sigtimedwait(signals, _PATIENCE_SECONDS) if waiting else signal.sigwaitinfo(signals)
        if came is None:  # it was sent to this process alone
            for number in waiting:
                process.send_signal(number)
            waiting.clear()
        elif came.si_signo != signal.SIGCHLD:
            waiting.append(came.si_signo)
            was_interrupted |= came.si_signo == signal.SIGINT
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if was_interrupted and process.returncode != 0:
        print("mpistrat run: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
