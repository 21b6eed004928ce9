"""What import-linter cannot see of the package: imports hidden in strings. And where unit tests lie."""

import ast
from pathlib import Path

_ROOT = Path(__file__).parents[1]

# They look names up in a table when these are first used: public names, and commands. Only tools lie above them.
_LOOK_UP_MODULES = {"mpistrat/lazy.py", "mpistrat/tools/cli.py"}


def hidden_imports(text, package):
    """Return where a module imports one of its package by a string, or an annotation is one: linters see neither."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            others = [ast.literal_eval(part) for part in node.args[:1] if isinstance(part, ast.Constant)]
            if not others or others[0].partition(".")[0] == package:
                found.append(ast.unparse(node))
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in annotations):
            found.append(ast.unparse(node).partition("\n")[0])
    return found


def test_no_import_is_hidden_in_a_string():
    paths = {path.relative_to(_ROOT).as_posix(): path for path in (_ROOT / "mpistrat").rglob("*.py")}
    found = {name: hidden_imports(path.read_text(), "mpistrat") for name, path in paths.items()}
    assert {name for name, hidden in found.items() if hidden} == _LOOK_UP_MODULES, found


def test_unit_tests_lie_in_the_folder_of_their_package():
    folders = {path.parent.name for path in (_ROOT / "tests" / "unit").glob("*/test_*.py")}
    packages = {path.parent.name for path in (_ROOT / "mpistrat").glob("*/__init__.py")}
    assert sorted(folders - packages) == ["harness"], "harness: what tests are made with"


_PLANTED = """
import importlib
def ask(value: "User"):
    importlib.import_module("p.low")
    importlib.import_module("numpy")
"""


def test_each_check_finds_what_is_planted():
    assert sorted(hidden_imports(_PLANTED, "p")) == ["importlib.import_module('p.low')", "value: 'User'"]
