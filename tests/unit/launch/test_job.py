"""What follows an mpiexec: its exit code, the limit of its time, and its stderr, in which banners come last and once."""

import os
import re
import signal
import sys
import threading
import time

import pytest

from mpistrat.launch import mpiexec
from mpistrat.launch.mpiexec import TIMED_OUT, Banners, Ended, Killed, follow, relay_stderr
from mpistrat.launch.process import children, find
from tests.processes import TAKES_CTRL_C, run_bounded

# other tests of this process may have imported JAX, which warns of every fork
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")


def shell(text):
    return ["sh", "-c", text]


def test_exit_codes_are_handed_on_and_why_a_job_has_ended_is_known(capfd):
    assert follow(shell("echo out; echo err >&2; exit 3"), os.environ) == Ended(3)
    assert capfd.readouterr() == ("out\n", "err\n")
    assert follow(shell("kill -9 $$"), os.environ).code == 128 + 9
    # as prterun ends when SLURM has ended its daemons: it gives the status of srun, of which exit takes the lowest byte
    lost = "echo 'srun returned non-zero exit status (36608) from launching' >&2; exit 0"
    assert follow(shell(lost), os.environ).code == 143
    reports: list[object] = []
    assert follow(shell("exit 7"), os.environ, 60.0, reports.append).code == 7
    assert reports == []
    ended = follow(shell("echo '[rank 3 on vm, thread Thread-1] Traceback' >&2; exit 1"), os.environ)
    assert ended == Ended(1, failed="rank 3 on vm")
    ended = follow(shell("echo '[rank 2 on vm] Traceback, [rank 3 on vm] Traceback' >&2; exit 1"), os.environ)
    assert ended == Ended(1, failed="rank 2 on vm")
    ended = follow(shell("echo 'rank 1 with PID 77 on node vm exited on signal 9 (Killed)' >&2; exit 137"), os.environ)
    assert ended == Ended(137, killed=Killed(77, "vm", 9))


@pytest.mark.parametrize(
    ("name", "code", "returned", "said"),
    [
        ("TERM", 1, 143, "ended by SIGTERM"),
        ("HUP", 1, 129, "ended by SIGHUP"),
        ("INT", 5, 130, "interrupted"),
        ("TERM", 5, 5, ""),
        ("USR1", 5, 5, ""),
    ],
)
def test_a_signal_that_ends_the_job_is_told_and_is_its_code(name, code, returned, said):
    command = f"trap 'exit {code}' {name}; kill -{name} $PPID; while :; do sleep 0.05; done"
    program = "import os; from mpistrat.launch import mpiexec; mpiexec._FORWARD_SECONDS = 0.05; "
    program += f"ended = mpiexec.follow(['sh', '-c', {command!r}], os.environ); "
    program += "print(*ended.signals, ended.was_stopped); raise SystemExit(ended.code)"
    done = run_bounded([*TAKES_CTRL_C, sys.executable, "-c", program], 60.0)
    assert (done.returncode, done.stderr) == (returned, f"mpistrat run: {said}\n" if said else "")
    assert done.stdout == f"{signal.Signals[f'SIG{name}'].value} {name != 'USR1'}\n"


def test_what_ignores_a_signal_that_ends_the_job_is_killed_at_the_third():
    command = "trap '' TERM; for _ in 1 2 3; do kill -TERM $PPID; sleep 0.3; done; while :; do sleep 0.05; done"
    program = "import os; from mpistrat.launch import mpiexec; mpiexec._FORWARD_SECONDS = 0.05; "
    program += f"raise SystemExit(mpiexec.follow(['sh', '-c', {command!r}], os.environ).code)"
    done = run_bounded([sys.executable, "-c", program], 20.0)
    assert (done.returncode, done.stderr) == (143, "mpistrat run: ended by SIGTERM\n")


def test_a_limit_ends_the_job_after_the_report_and_kills_what_does_not_end(capfd, monkeypatch):
    alive = []
    started = time.monotonic()
    argv = shell("trap 'echo ended >&2; exit 0' TERM; sleep 60 >/dev/null 2>&1 & wait")
    ended = follow(argv, os.environ, 0.3, lambda pid: alive.append(os.path.exists(f"/proc/{pid}")))  # noqa: PTH110
    assert ended == Ended(TIMED_OUT, timed_out=True)
    assert alive == [True]
    assert time.monotonic() - started < 30
    assert capfd.readouterr().err == "ended\n"
    monkeypatch.setattr(mpiexec, "_END_SECONDS", 0.2)
    started = time.monotonic()
    assert follow(shell("trap '' TERM; exec sleep 60"), os.environ, 0.2).code == TIMED_OUT
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("name", ["KILL", "QUIT"])
def test_what_a_killed_launcher_has_started_is_ended_too(monkeypatch, capfd, name):
    monkeypatch.setattr(mpiexec, "_ORPHAN_SECONDS", 0.2)
    code, before = 128 + signal.Signals[f"SIG{name}"], children(os.getpid())
    assert follow(shell(f"(sleep 60 & exec sleep 61) & echo $!; ulimit -c 0; kill -{name} $$"), os.environ).code == code
    out, err = capfd.readouterr()
    assert (find(int(out)), children(os.getpid()) - before) == (None, set())
    assert re.fullmatch(rf"mpistrat run: mpiexec \(process \d+\) was ended by signal {code - 128} .*", err.strip())


def test_what_keeps_stderr_open_does_not_keep_the_job(monkeypatch):
    monkeypatch.setattr(mpiexec, "_RELAY_SECONDS", 0.2)
    started = time.monotonic()
    assert follow(shell("sleep 5 & exit 4"), os.environ).code == 4
    assert time.monotonic() - started < 4


LINE = b"-" * 74 + b"\n"
ABORT = LINE + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Proc: [[1,1],1]\n\nNOTE: it ends.\n" + LINE
EXITED = LINE + b'prterun has exited due to process rank 1 with PID 0 on node vm calling\n"abort". This may have\n' + LINE
TRACEBACK = b"Traceback (most recent call last):\nValueError: planted\n"


def through(*pieces):
    held = Banners()
    return b"".join([*map(held.feed, pieces), held.end()])


LOST = b"[vm:7] PMIX ERROR: PMIX_ERR_UNREACH in file server.c at line 1\n"  # in a banner, or elsewhere
CODE = LINE + LOST + b"prterun detected that one or more processes exited with non-zero status\n   Exit code:    42\n" + LINE
AGAIN = ABORT.replace(b"rank 1", b"rank 0")
TAGGED = b"".join(b"[1]<stderr>: " + line for line in ABORT.splitlines(keepends=True))
TRACE = b"[0]<stderr>: Traceback\n"
MESSAGE = LINE + b"There are not enough slots available in the system\n" + LINE


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ((b"half a line" + ABORT, b"\0" + EXITED, TRACEBACK, AGAIN, b"\0"), b"half a line" + TRACEBACK + ABORT + EXITED),
        ((TAGGED, b"[1]<stderr>: \0", EXITED, TRACE), TRACE + TAGGED + EXITED),  # lines may begin with the rank
        ((CODE, b"text\n"), b"text\n" + CODE),
        ((LOST, b"text\n"), b"text\n" + LOST),
        (
            (CODE, b"mpistrat: the job stops after step 7, which is saved\n"),
            b"mpistrat: the job stops after step 7, which is saved\n",
        ),
        ((MESSAGE + b"\0", b"a\0b"), MESSAGE + b"ab"),
    ],
)
def test_banners_come_after_the_traceback_once_and_without_nul(pieces, told):
    assert through(*pieces) == told


@pytest.mark.parametrize(
    "reason",
    [
        b"[rank 1 on vm] Traceback (most recent call last):\n[rank 1 on vm] ValueError: planted\n",
        b"[rank 1 on vm, thread Thread-1] sys.exit(3) in a thread ends the job\n",
        b"[1]<stderr>: [rank 1 on vm] interrupted\n",
        b"mpistrat: the job stops after step 7, which is saved: rank 1 has received SIGUSR1\n",
        b"mpistrat tune: file.json cannot be written\n",
    ],
)
def test_a_rank_that_says_why_it_ends_the_job_is_enough(reason):
    half, more = len(reason) // 2, b"more\n" * 500
    assert through(ABORT, LOST, CODE, b"\0" + EXITED + reason[:half], reason[half:] + more) == reason + more


@pytest.mark.parametrize("size", [1, 50, 10_000])
@pytest.mark.parametrize(
    ("text", "killed"),
    [
        (b"prterun noticed that process rank 1 with PID 77 on node vm exited on\nsignal 9 (Killed).\n", Killed(77, "vm", 9)),
        (
            b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 77 RUNNING AT vm\n=   EXIT CODE: 11\n"
            b"=   CLEANING UP REMAINING PROCESSES\n" + b"=" * 80 + b"\n"
            b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)\n",
            Killed(77, "vm", 11),
        ),
        (b"=   PID 77 RUNNING AT vm\n=   EXIT CODE: 9\n", None),
        (EXITED, None),
    ],
)
def test_the_process_that_a_signal_has_ended_is_known(text, killed, size):
    held, text = Banners(), b"x" * 2000 + text + b"y" * 3000
    for start in range(0, len(text), size):
        held.feed(text[start : start + size])
    assert held.killed == killed


@pytest.mark.parametrize(
    "text",
    [
        b"bytes of a program: \0\1\2\xff",
        b"---- a heading ----\n",
        b"-" * 200,
        LINE + b"what a program says of itself\n" + LINE,
        LINE + b"prterun noticed that process rank 1 with PID 7 on node vm exited on\nsignal 9 (Killed).\n" + LINE,
        LINE + b"MPI_ABORT was invoked, and the rest is lost",
    ],
)
def test_everything_else_is_printed_at_once(text):
    held = Banners()
    for byte in (text[index : index + 1] for index in range(len(text))):
        assert held.feed(byte) == byte
    assert through(text) == text


def test_a_long_log_costs_little():
    chunk, held = (b"x" * 99 + b"\n") * 655, Banners()
    started = time.process_time()
    for _ in range(128):  # 8 MB, for which a pattern at every byte takes seconds
        assert held.feed(chunk) == chunk
    assert time.process_time() - started < 0.3


@pytest.fixture
def relayed():
    """Begin to relay: give what is written to, what is read from, and the thread that relays."""
    source, writer = os.pipe()
    reader, target = os.pipe()
    os.set_blocking(target, False)
    thread = threading.Thread(target=relay_stderr, args=(source, target, Banners()))
    thread.start()
    return writer, reader, thread


def test_a_banner_may_come_in_pieces(relayed):
    writer, reader, thread = relayed
    for piece in (LINE, EXITED[len(LINE) : -len(LINE)], LINE, b"\0", b"[rank 1 on vm] Traceback\n", LINE):
        os.write(writer, piece)
        time.sleep(0.01)
    assert os.read(reader, 1000) == b"[rank 1 on vm] Traceback\n"
    assert os.read(reader, 1000) == LINE  # a progress bar, which goes on in an hour
    os.close(writer)
    thread.join(10)
    assert not thread.is_alive()


def test_writers_see_that_nobody_reads(relayed, monkeypatch):
    monkeypatch.setattr(mpiexec, "_READ_BYTES", 10)
    writer, reader, thread = relayed
    os.close(reader)
    os.write(writer, b"x")
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"y")
    os.close(writer)


def test_a_full_pipe_that_does_not_block_is_waited_for(relayed):
    writer, reader, thread = relayed
    text = b"x" * 300_000

    def write():
        with os.fdopen(writer, "wb") as stream:
            stream.write(text)

    threading.Thread(target=write).start()
    got = b""
    while len(got) < len(text):
        got += os.read(reader, 1 << 16)
    thread.join(10)
    assert got == text
    os.close(reader)
