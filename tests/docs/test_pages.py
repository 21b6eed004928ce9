"""Every snippet runs, every command prints what is shown, every generated part is current. For links see test_site."""

import difflib
import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.generate import stale
from tests.docs.pages import ROOT, Command, blocks, pages
from tests.processes import run_bounded

OPTIONAL = re.compile(r"^import (torch|jax)$", re.MULTILINE)  # what pages may show and the tests must do without
SELECTION = re.compile(r"pytest (tests/\w+/\w+\.py[^`#\n]*)")
SELECTIONS = sorted({found for page in pages() for found in SELECTION.findall(page.read_text())})
PAGES = [page.relative_to(ROOT).as_posix() for page in pages()]


def user_environment():
    """Return the environment of a reader: this Python first, no settings, and leave for plain mpiexec to run here."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MPISTRAT_")}
    return environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


@pytest.mark.parametrize("name", [name for name in PAGES if re.search("```(python|console)", (ROOT / name).read_text())])
def test_snippets_run_and_print_what_is_shown(name, tmp_path):
    text = (ROOT / name).read_text()
    missing = [library for library in sorted(set(OPTIONAL.findall(text))) if importlib.util.find_spec(library) is None]
    if missing:
        pytest.skip(f"no {' and '.join(missing)}: pip install '.[interop]'")
    unused, number = set(), 0
    for block in blocks(text):
        where = f"{name}, line {block.line}"
        if block.language == "python":
            number += not block.file_name
            file = tmp_path / (block.file_name or f"snippet_{number}.py")
            file.write_text(block.text)
            unused |= {block.file_name} - {""}
            commands = [] if block.file_name else [Command(f"python {file.name}", "")]
        else:
            commands = block.commands() if block.language == "console" else []
            others = [command.on(num_ranks) for num_ranks in block.ranks for command in commands]
            commands += [command for command in others if command not in commands]
        for command in commands:
            done = run_bounded(["bash", "-c", command.line], 120.0, user_environment(), tmp_path)
            assert done.returncode == 0, f"{where}: {command.line} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
            assert command.matches(done.stdout), f"{where}: {command.line} printed\n{done.stdout}\nshown is\n{command.output}"
            unused = {file for file in unused if file not in command.line}
    assert not unused, f"{name} shows {', '.join(unused)} and no command that runs it"


def test_generated_parts_are_current():
    for path, text in stale().items():
        old = path.read_text().splitlines() if path.exists() else []
        changes = "\n".join(difflib.unified_diff(old, text.splitlines(), "as it is", "as it should be", lineterm="", n=1))
        pytest.fail(f"{path.relative_to(ROOT)} is not current; python -m tests.docs.generate writes it:\n{changes}")


@pytest.mark.parametrize("selection", SELECTIONS)
def test_pages_select_tests_that_exist(selection):
    done = run_bounded([sys.executable, "-m", "pytest", "--collect-only", "-q", *shlex.split(selection)], 60.0, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_readme_gives_the_two_commands():
    text = (ROOT / "README.md").read_text()
    commands = {line for block in blocks(text) if block.language == "sh" for line in block.text.splitlines()}
    assert "python3 -m venv .venv && .venv/bin/pip install '.[demo]' && .venv/bin/mpistrat demo" in commands
    assert "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest" in commands


@pytest.mark.parametrize(
    ("output", "printed", "matches"),
    [
        ("", "anything\n", True),
        ("4 replicas\n", "4 replicas  \n", True),
        ("4 replicas\n", "40 replicas\n", False),
        ("a (b)\n", "a (b)\n", True),
        ("took … s\n", "took 1.5 s\n", True),
        ("took … s\n", "took 1.5\ns\n", False),
        ("first\n...\nlast\n", "first\n1\n2\nlast\n", True),
        ("first\n...\nlast\n", "first\nlast\n", True),
        ("first\n...\nlast\n", "last\n", False),
    ],
)
def test_comparison_of_output_can_fail(output, printed, matches):
    assert Command("", output).matches(printed) is matches


def test_a_page_may_say_on_how_many_ranks_it_prints_the_same():
    fence = "```console\n$ mpistrat run -n 2 a.py\ndone\n```\n"
    plain, several = blocks(f"It prints:\n\n{fence}\nIt prints the same on 1, 2 and 3 ranks:\n\n{fence}")
    assert (plain.ranks, several.ranks) == ((), (1, 2, 3))
    [command] = several.commands()
    assert command.on(3) == Command("mpistrat run -n 3 a.py", "done\n")
    with pytest.raises(AssertionError, match="not a command for any number of ranks: python a.py"):
        Command("python a.py", "").on(2)
