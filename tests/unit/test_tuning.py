"""Tunings: documents come back as they went, and strange files do no harm."""

import dataclasses
import json
from pathlib import Path

import pytest

from mpistrat import tuning
from mpistrat.algorithms.planners import NOTHING, Measured
from mpistrat.topology.world import World
from mpistrat.tuning import Conditions, Tuning, read, tuning_path, world_like

WORLD = World.from_shape("2x2")
HERE = Conditions("node", "a processor, 2 cores", "Open MPI v5.0.11", "2x2 block")
TUNING = Tuning(HERE, {name: {16: 1e-5} for name in ("flat", "hierarchical")})


def changed(**fields):
    return json.dumps({**TUNING.document(), **fields})


def test_the_conditions_and_the_seconds_make_a_world_and_a_choice():
    assert world_like(HERE) == WORLD, "the world follows from its shape"
    assert TUNING.measured("a file") == Measured(TUNING.seconds, f"a file, {TUNING.date}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "it is not a file of mpistrat tune (TypeError"),
        ("{}", "it is not a file of mpistrat tune (KeyError: 'format')"),
        (changed(format=1), "it has format 1, and this version of mpistrat reads format 2"),
        ("[" * 100_000, "it is not a file of mpistrat tune (RecursionError"),
        (changed(conditions={}), "it is not a file of mpistrat tune (TypeError"),
        (changed(seconds={"best": {"16": 1e-5}}), "it names unknown algorithms: best"),
        *((changed(seconds={"flat": wrong}), "it holds what is not a positive number") for wrong in ({"16": -1}, {"-16": 1})),
        (changed(seconds={"flat": {"16": 10**400}}), "it is not a file of mpistrat tune (OverflowError"),
        (changed(seconds={"flat": {"16": "soon"}}), "could not convert string to float: 'soon'"),
        (changed(seconds=3), "it is not a file of mpistrat tune (TypeError"),
        (
            changed(conditions={**dataclasses.asdict(HERE), "mpi": "MPICH 5"}),
            "it was measured under other conditions: mpi 'MPICH 5', here 'Open MPI v5.0.11'",
        ),
    ],
)
def test_what_cannot_be_used_is_said_and_ignored(text, reason, tmp_path, capsys):
    path = tmp_path / HERE.file_name
    path.write_text(text)
    assert read(path, HERE) is None
    said = capsys.readouterr().err
    assert said.startswith(f"mpistrat: {path} is ignored: ")
    assert reason in said
    assert said.endswith("; mpistrat tune writes it anew\n")


def test_no_file_is_the_usual_case_and_one_is_written_whole_and_read_again(tmp_path, capsys):
    assert read(tmp_path / HERE.file_name, HERE) is None
    (tmp_path / "file").touch()
    assert read(tmp_path / "file" / HERE.file_name, HERE) is None
    assert capsys.readouterr().err == ""
    assert read(tmp_path / "mine.json", HERE) is None
    assert f"MPISTRAT_TUNING names {tmp_path / 'mine.json'}, which does not exist" in capsys.readouterr().err
    path = tmp_path / "new" / HERE.file_name
    for _ in range(2):
        TUNING.write(path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert read(path, HERE) == TUNING.measured(str(path))
    assert capsys.readouterr().err == ""
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        TUNING.write(path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "what cannot be put there is removed"


def test_the_home_of_nobody_stops_no_program(monkeypatch, capsys):
    monkeypatch.setenv("MPISTRAT_TUNING", "~nobody-of-this-name/mine.json")
    assert tuning._find(WORLD) is NOTHING
    assert "home" in capsys.readouterr().err


def test_each_conditions_have_a_file_of_their_own(monkeypatch, tmp_path):
    others = [dataclasses.replace(HERE, **{field.name: "other"}) for field in dataclasses.fields(HERE)]
    assert len({conditions.file_name for conditions in (HERE, *others)}) == 6
    assert HERE.file_name.startswith("node-2x2-block-")
    assert len(dataclasses.replace(HERE, world="+".join("1" * 999)).file_name) < 100
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning_path(HERE) == tmp_path / "mpistrat" / HERE.file_name
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # to be ignored, by that convention
    monkeypatch.setenv("HOME", "/somewhere")
    assert tuning.folder() == Path("/somewhere/.cache/mpistrat")
    monkeypatch.setenv("HOME", "~")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(RuntimeError, match="home"):
        tuning.folder()
    monkeypatch.setenv("MPISTRAT_TUNING", "/else/mine.json")
    assert tuning_path(HERE) == Path("/else/mine.json")
