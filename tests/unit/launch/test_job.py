"""What follows an mpiexec: its exit code, the limit of its time, and its stderr."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from mpistrat.launch import job
from mpistrat.launch.job import TIMED_OUT, Killed, Stderr, follow
from tests.processes import TAKES_CTRL_C, run_bounded

# other tests of this process may have imported JAX, which warns of every fork
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


def test_exit_codes_are_handed_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert follow(shell("echo out; echo err >&2; exit 3"), os.environ, print) == 3
    assert capfd.readouterr() == ("out\n", "err\n")
    assert follow(shell("kill -9 $$"), os.environ, print) == 128 + 9


@pytest.mark.parametrize(
    ("name", "code", "returned", "said"),
    [
        ("TERM", 1, 143, "ended by SIGTERM"),
        ("HUP", 1, 129, "ended by SIGHUP"),
        ("INT", 5, 130, "interrupted"),
        ("TERM", 5, 5, ""),
    ],
)
def test_a_signal_that_ends_the_job_is_told_and_is_its_code(name: str, code: int, returned: int, said: str) -> None:
    command = f"trap 'exit {code}' {name}; kill -{name} $PPID; while :; do sleep 0.05; done"
    program = "import os; from mpistrat.launch.job import follow; "
    program += f"raise SystemExit(follow(['sh', '-c', {command!r}], os.environ, print))"
    done = run_bounded([*TAKES_CTRL_C, sys.executable, "-c", program], 60.0)
    assert (done.returncode, done.stderr) == (returned, f"mpistrat run: {said}\n" if said else "")


def test_a_job_that_ends_in_time_has_no_report() -> None:
    reports: list[object] = []
    assert follow(shell("exit 7"), os.environ, reports.append, 60.0, reports.append) == 7
    assert reports == []


def test_a_limit_ends_the_job_after_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    alive = []
    started = time.monotonic()
    argv = shell("trap 'echo ended >&2; exit 0' TERM; sleep 60 >/dev/null 2>&1 & wait")
    code = follow(argv, os.environ, print, 0.3, lambda pid: alive.append(os.path.exists(f"/proc/{pid}")))  # noqa: PTH110
    assert code == TIMED_OUT
    assert alive == [True]
    assert time.monotonic() - started < 30
    assert capfd.readouterr().err == "ended\n"


def test_what_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_END_SECONDS", 0.2)
    started = time.monotonic()
    assert follow(shell("trap '' TERM; exec sleep 60"), os.environ, print, 0.2) == TIMED_OUT
    assert time.monotonic() - started < 30


def test_what_keeps_stderr_open_does_not_keep_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_RELAY_SECONDS", 0.2)
    started = time.monotonic()
    assert follow(shell("sleep 5 & exit 4"), os.environ, print) == 4
    assert time.monotonic() - started < 4


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
        (b'prterun has exited due to process rank 1 with PID 0 on node vm calling\n"abort". This may have\n', None),
    ],
)
def test_the_process_that_a_signal_has_ended_is_known(text: bytes, killed: Killed | None, size: int) -> None:
    printed, text = Stderr(-1, -1), b"x" * 2000 + text + b"y" * 3000
    for start in range(0, len(text), size):
        printed.look(text[start : start + size])
    assert printed.killed == killed


def test_a_long_log_costs_little() -> None:
    chunk, printed = (b"x" * 99 + b"\n") * 655, Stderr(-1, -1)
    started = time.process_time()
    for _ in range(128):  # 8 MB, for which a pattern at every byte takes seconds
        printed.look(chunk)
    assert time.process_time() - started < 0.3


def test_writers_see_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_READ_BYTES", 10)
    source, writer = os.pipe()
    reader, target = os.pipe()
    printed = Stderr(source, target)
    printed.start()
    os.close(reader)
    os.write(writer, b"x")
    printed.join(10)
    assert not printed.is_alive()
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"y")
    os.close(writer)


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    source, writer = os.pipe()
    reader, target = os.pipe()
    os.set_blocking(target, False)
    printed = Stderr(source, target)
    printed.start()
    text = b"x" * 300_000

    def write() -> None:
        with os.fdopen(writer, "wb") as stream:
            stream.write(text)

    threading.Thread(target=write).start()
    got = b""
    while len(got) < len(text):
        got += os.read(reader, 1 << 16)
    printed.join(10)
    assert got == text
    for end in (reader, target):
        os.close(end)
