"""What import-linter cannot see of the package: import cycles between modules of one layer, and imports hidden in strings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]

# They look names up in a table when these are first used: public names, and commands. Only tools lie above them.
_LOOK_UP_MODULES = {"mpistrat.lazy", "mpistrat.tools.cli"}


class Package:
    """The syntax trees of a package, from the text of each module; the name of a package's own text is that of the package."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in sources.items()}
        self.root = min(sources, key=len)

    @classmethod
    def read(cls, folder: Path) -> Package:
        paths = {path.relative_to(folder.parent).with_suffix("").parts: path for path in sorted(folder.rglob("*.py"))}
        return cls({".".join(parts).removesuffix(".__init__"): path.read_text() for parts, path in paths.items()})

    def imports(self, module: str) -> set[str]:
        """Return which modules of the package a module imports: at its top, in functions, for type checkers alone."""
        return {self._module_of(name) for name in self._imported(module)} - {module, ""}

    def _imported(self, module: str) -> Iterator[str]:
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def _module_of(self, name: str) -> str:
        while name and name not in self.trees:
            name = name.rpartition(".")[0]
        return name


def in_cycles(package: Package) -> set[str]:
    """Return the modules that import themselves by way of others."""
    imports = {module: package.imports(module) for module in package.trees}

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        coming = [start]
        while coming:
            new = imports[coming.pop()] - found
            found |= new
            coming += new
        return found

    return {module for module in package.trees if module in reached(module)}


def hidden_imports(package: Package) -> set[str]:
    """Return where a module of the package is imported by a string, or an annotation is one: linters see neither."""
    found = set()
    for module, tree in package.trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
                others = [ast.literal_eval(part) for part in node.args[:1] if isinstance(part, ast.Constant)]
                if not others or others[0].partition(".")[0] == package.root:
                    found.add(f"{module}: {ast.unparse(node)}")
            annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
            if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in annotations):
                found.add(f"{module}: {ast.unparse(node).partition(chr(10))[0]}")
    return found


@pytest.fixture(scope="module")
def package():
    return Package.read(_ROOT / "mpistrat")


def test_no_module_imports_itself_by_way_of_others(package):
    assert sorted(in_cycles(package)) == [], "imports in functions and for type checkers count"


def test_no_import_is_hidden_in_a_string(package):
    found = {place for place in hidden_imports(package) if place.partition(":")[0] not in _LOOK_UP_MODULES}
    assert sorted(found) == []
    above = {module for module in package.trees for name in package.imports(module) if name == "mpistrat.tools.cli"}
    assert above == {"mpistrat.__main__"}


def test_unit_tests_lie_in_the_folder_of_their_package():
    folders = {path.parent.name for path in (_ROOT / "tests" / "unit").glob("*/test_*.py")}
    packages = {path.parent.name for path in (_ROOT / "mpistrat").glob("*/__init__.py")}
    assert sorted(folders - packages) == ["harness"], "harness: what tests are made with"


_PLANTED = {
    "p": "from p.low import Kept",
    "p.low": "class Kept: ...",
    "p.high": """
import importlib
from p import low
def ask(value: "User"):
    importlib.import_module("p.low")
    importlib.import_module("numpy")
""",
    "p.a.low": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import thing",
    "p.b": "def thing():\n    from p.c import other",
    "p.c": "import p.a.low\nimport p.high",
}


def test_each_check_finds_what_is_planted():
    planted = Package(_PLANTED)
    assert in_cycles(planted) == {"p.a.low", "p.b", "p.c"}
    assert hidden_imports(planted) == {"p.high: importlib.import_module('p.low')", "p.high: value: 'User'"}
