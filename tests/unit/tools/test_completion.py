"""`mpistrat completion`: scripts that shells take, and what bash completes with its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.tools import cli

# what bash does when Tab is pressed behind these words
COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_mpistrat mpistrat "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_know_every_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for word in (*cli.COMMANDS, "tag-output", "hostfile", "wire-dtype"):
        assert word in text
    if shell != "bash":
        assert cli.COMMANDS["tune"][1] in text


def test_bash_takes_the_script_and_completes_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "completion"
    path.write_text(script("bash", capsys))
    (tmp_path / "train.py").touch()
    (tmp_path / "folder").mkdir()
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""

    def completed(*words: str) -> set[str]:
        argv = ["bash", "-c", COMPLETE, "bash", str(path), "mpistrat", *words]
        return set(subprocess.run(argv, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split())

    assert completed("") == {*cli.COMMANDS}
    assert completed("be") == {"bench"}
    assert completed("run", "--t") == {"--tag-output", "--timeout"}
    assert completed("run", "-n", "4", "tr") == {"train.py"}
    assert completed("run", "--hostfile", "tr") == {"train.py"}
    assert completed("demo", "--out", "") == {"folder"}
    assert completed("bench", "all_reduce", "--algorithm", "p") == {"pipelined"}


def test_a_missing_shtab_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert capsys.readouterr().err.endswith(": pip install shtab\n")
