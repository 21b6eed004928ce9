"""What follows an mpiexec: its exit code, its stderr, and the limit of its time."""

from __future__ import annotations

import os
import sys
import time

import pytest

from mpistrat.launch import job
from mpistrat.launch.job import TIMED_OUT, Limit, follow
from tests.processes import run_bounded

# other tests of this process may have imported JAX, which warns of every fork
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


def test_exit_codes_are_handed_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert follow(shell("echo out; echo err >&2; exit 3"), os.environ) == 3
    assert capfd.readouterr() == ("out\n", "err\n")
    assert follow(shell("kill -9 $$"), os.environ) == 128 + 9


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
    program = (
        f"import os; from mpistrat.launch.job import follow; raise SystemExit(follow(['sh', '-c', {command!r}], os.environ))"
    )
    done = run_bounded([sys.executable, "-c", program], 60.0)
    assert (done.returncode, done.stderr) == (returned, f"mpistrat run: {said}\n" if said else "")


def test_a_job_that_ends_in_time_has_no_report() -> None:
    reports: list[int] = []
    assert follow(shell("exit 7"), os.environ, Limit(60.0, reports.append)) == 7
    assert reports == []


def test_a_limit_ends_the_job_after_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    alive = []
    started = time.monotonic()
    limit = Limit(0.3, lambda pid: alive.append(os.path.exists(f"/proc/{pid}")))  # noqa: PTH110
    assert follow(shell("trap 'echo ended >&2; exit 0' TERM; sleep 60 >/dev/null 2>&1 & wait"), os.environ, limit) == TIMED_OUT
    assert alive == [True]
    assert time.monotonic() - started < 30
    assert capfd.readouterr().err == "ended\n"


def test_what_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_END_SECONDS", 0.2)
    started = time.monotonic()
    assert follow(shell("trap '' TERM; exec sleep 60"), os.environ, Limit(0.2, lambda _: None)) == TIMED_OUT
    assert time.monotonic() - started < 30


def test_what_keeps_stderr_open_does_not_keep_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_RELAY_SECONDS", 0.2)
    started = time.monotonic()
    assert follow(shell("sleep 5 & exit 4"), os.environ) == 4
    assert time.monotonic() - started < 4
