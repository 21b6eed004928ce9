"""``mpistrat tune``: what it prints, keeps and shows, and what it refuses."""

import os

import pytest

from mpistrat.tools import cli
from tests.processes import run_mpistrat


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Give the folder in which files are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MPISTRAT_TUNING", "auto")
    return tmp_path / "mpistrat"


def test_it_measures_and_keeps_and_shows(kept, monkeypatch, capsys):
    done = run_mpistrat("tune", "-n", "2", "--max-bytes", "1KiB")
    [path] = kept.iterdir()
    assert f"\nWrote {path}. Programs use it automatically; MPISTRAT_TUNING=off ignores it" in done.stdout
    lines = done.stdout.splitlines()
    heads = next(line.split() for line in lines if line.startswith("size"))
    assert heads == ["size", "flat", "hierarchical", "auto", "chooses"]
    assert [line.split() for line in lines if line.startswith("ranks")] == [["ranks", "1x2", "block"]]
    for size in ("16 B", "64 B", "256 B", "1 KiB"):
        row = next(line.split() for line in reversed(lines) if line.startswith(f"{size} "))
        assert row[-1] in ("flat", "hierarchical")

    (kept / "other.json").write_text("{}")
    assert cli.main(["tune", "--show"]) == 0
    shown = capsys.readouterr().out
    assert f"{path}\n\ncluster " in shown
    assert f"{kept / 'other.json'}\nignored: it is not a file of mpistrat tune" in shown
    assert shown.endswith(f"2 files of mpistrat tune in {kept}\n")
    monkeypatch.setenv("MPISTRAT_TUNING", str(kept / "other.json"))
    assert cli.main(["tune", "--show"]) == 0
    assert str(path) not in capsys.readouterr().out


def test_files_that_are_not_ours_are_shown_as_such(kept, capsys):
    kept.mkdir()
    (kept / "deep.json").write_text("[" * 100_000)
    os.mkfifo(kept / "pipe.json")
    assert cli.main(["tune", "--show"]) == 0
    said = capsys.readouterr().out
    assert "ignored: it is nested too deeply to be a file of mpistrat" in said
    assert "ignored: it is not a regular file" in said


def test_one_rank_has_nothing_to_tune(kept):
    done = run_mpistrat("tune", "-n", "1", code=2)
    assert "a single rank has no other to communicate with; start more: mpistrat tune -n 4" in done.stderr
    assert not kept.exists()
