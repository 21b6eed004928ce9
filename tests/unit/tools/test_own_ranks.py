"""The options -n and --nodes of bench and tune: outside of a job they start ranks, inside they must be those of the job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpistrat.launch import environment
from mpistrat.launch.environment import LauncherView
from mpistrat.tools import bench, cli, run, tune

Started = list[tuple[list[str], int, str]]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Give the jobs that would be started, and let no measurement begin."""
    jobs: Started = []
    monkeypatch.setattr(run, "start", lambda program, ranks, nodes: jobs.append((program, ranks, nodes)) or 7)
    for command in (bench, tune):
        monkeypatch.setattr(command, "start", lambda: pytest.fail("started MPI"))
    return jobs


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make this process a rank of a job of that size."""
    return lambda size: monkeypatch.setattr(environment, "detect", lambda: LauncherView("srun", 1, size))


@pytest.mark.parametrize(
    ("words", "ranks", "nodes"),
    [
        (["bench", "all_reduce", "-n", "4", "--max-bytes", "1KiB"], 4, ""),
        (["bench", "all_reduce", "--nodes", "2+1"], 3, "2+1"),
        (["tune", "-np", "4", "--nodes", "2x2"], 4, "2x2"),
        (["tune", "--ranks=2"], 2, ""),
    ],
)
def test_outside_of_a_job_the_same_command_runs_on_ranks_of_its_own(
    started: Started, words: list[str], ranks: int, nodes: str
) -> None:
    assert cli.main(words) == 7
    assert started == [(["-m", "mpistrat", *words], ranks, nodes)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune", "-n", "0"], "mpistrat tune: -n 0: a job needs at least 1 rank"),
        (["bench", "all_reduce", "-n", "4", "--nodes", "2x3"], "mpistrat bench: node shape '2x3' describes 6 ranks, but"),
        (["bench", "all_reduce", "-n", "2", "--max-bytes", "lots"], "mpistrat bench: 'lots' is not a size"),
        (["tune", "-n", "2", "--max-bytes", "8"], "mpistrat tune: --max-bytes 8 is too small"),
    ],
)
def test_bad_words_start_nothing(started: Started, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert started == []
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("words", [["bench", "all_reduce"], ["tune"]], ids=["bench", "tune"])
def test_a_rank_of_another_job_refuses(
    inside: Callable[[int], None], words: list[str], started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    inside(8)
    assert cli.main([*words, "-n", "4"]) == 2
    assert capsys.readouterr().err.endswith(
        ": 4 ranks are asked for inside a job of 8, which srun has started: leave out -n and --nodes there\n"
    )
    assert cli.main([*words, "--nodes", "4x2"]) == 2
    assert capsys.readouterr().err.endswith(
        ": --nodes 4x2 inside a job: MPISTRAT_VIRTUAL_NODES says it there, set before the job starts\n"
    )
    assert started == []


def test_the_ranks_of_the_job_that_was_asked_for_measure(
    inside: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    inside(4)
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", "2x2")
    begun = []

    def begin() -> None:
        begun.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "start", begin)
    for words in (["-n", "4"], ["--nodes", "2x2"], []):
        assert cli.main(["tune", *words]) == 130
    assert (begun, started) == ([True] * 3, [])
