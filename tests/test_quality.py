"""Quality gates: style, types, import contracts, packaging, the cost of an import, and the shape of the tree."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.processes import run_bounded

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT / "mpistrat"
_MODULES = sorted(_PACKAGE.rglob("*.py"))
_SCRIPTS = Path(sysconfig.get_path("scripts"))

_GATES = {
    "style": ["ruff", "check", "--no-cache", "."],
    "layout": ["ruff", "format", "--check", "--no-cache", "."],
    "types": ["mypy"],
    "contracts": ["lint-imports", "--no-cache"],
    "docstrings": ["numpydoc", "lint", *map(str, _MODULES)],
}
_MAX_LINES = 500  # most files stay under 300; more is fine where the subject is one
_BANNED = {"common", "core", "helper", "helpers", "lib", "manager", "misc", "util", "utils"}
_TOP = {
    *(".ci", ".gitignore", ".pre-commit-config.yaml", "pyproject.toml", "setup.cfg"),
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md"),
    *("docs", "mpistrat", "slurm", "tests"),
}
_MAX_IMPORT_SECONDS = 0.1


@pytest.mark.parametrize("gate", _GATES)
def test_gate(gate):
    program, *arguments = _GATES[gate]
    done = run_bounded([str(_SCRIPTS / program), *arguments], 240, cwd=_ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Give the folder with the built wheel and source archive; they are built from a copy, so that none is left here."""
    copy = tmp_path_factory.mktemp("build") / "mpistrat"
    unwanted = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "tests")
    shutil.copytree(_ROOT, copy, ignore=unwanted)
    done = run_bounded([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist")], 240, cwd=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy / "dist"


def test_the_index_would_take_the_distributions(distributions):
    files = [str(path) for path in sorted(distributions.iterdir())]
    assert [path.rpartition(".")[2] for path in files] == ["whl", "gz"]
    done = run_bounded([sys.executable, "-m", "twine", "check", "--strict", *files], 60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_the_package_and_nothing_else(distributions):
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {
        str(path.relative_to(_ROOT)) for path in [*_MODULES, _PACKAGE / "py.typed", _PACKAGE / "device" / "kernels.cu"]
    }


def test_the_source_archive_has_the_license(distributions):
    (source,) = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.getnames())


def test_importing_the_package_is_nearly_free():
    program = (
        "import time, numpy, sys; start = time.perf_counter(); import mpistrat; print(time.perf_counter() - start); "
        "print(*sorted({'mpi4py', 'cupy', 'torch', 'jax', 'mpistrat.launch.bootstrap'} & set(sys.modules)))"
    )
    texts = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout for _ in range(5)
    ]
    seconds = sorted(float(text.splitlines()[0]) for text in texts)
    assert {text.splitlines()[1] for text in texts} == {""}, "the import started MPI or CUDA"
    assert seconds[len(seconds) // 2] < _MAX_IMPORT_SECONDS, seconds


def test_every_public_name_is_there():
    package = importlib.import_module("mpistrat")
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name).__doc__, f"mpistrat.{name} has no docstring"
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=r"module 'mpistrat' has no attribute 'Strategie'; it has .*Strategy"):
        _ = package.Strategie


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_a_module_is_short_and_says_what_it_is(path):
    text = path.read_text()
    tree = ast.parse(text)
    caption = (ast.get_docstring(tree) or "").partition("\n")[0]
    assert caption.endswith((".", "?", ":")), f"no caption: {caption!r}"
    assert len(text.splitlines()) <= _MAX_LINES, "which second subject has moved in?"
    if '\nif __name__ == "__main__":' in text:
        return  # a script exports nothing
    exported = _exported(tree)
    public = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    assert public <= exported, "public, but not in __all__: name it there, or begin its name with an underscore"


def test_no_name_says_nothing():
    folders = (_PACKAGE, _ROOT / "tests", _ROOT / "docs")
    paths = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    assert [str(path) for path in paths if path.stem.lower() in _BANNED] == []


def test_nothing_strays_in_the_top_folder():
    listed = run_bounded(["git", "ls-files", "--cached", "--others", "--exclude-standard"], 30, cwd=_ROOT)
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    assert sorted({line.partition("/")[0] for line in listed.stdout.splitlines()} - _TOP) == []


def test_the_architecture_page_shows_the_real_tree():
    page = (_ROOT / "docs" / "explanation" / "architecture.md").read_text()
    real = {str(path.relative_to(_PACKAGE)) for path in [*_MODULES, _PACKAGE / "py.typed", _PACKAGE / "device" / "kernels.cu"]}
    real = {name for name in real if "/" not in name or not name.endswith("__init__.py")}
    drawn = _drawn_tree(page)
    assert sorted(drawn - real) == [], "drawn, but not there"
    assert sorted(real - drawn) == [], "there, but not drawn"


def _exported(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__" and isinstance(node.value, ast.List):
            return set(ast.literal_eval(node.value))
    return set()


def _drawn_tree(page: str) -> set[str]:
    """Return the files of the tree that a page draws under the line ``mpistrat/``: one or several joined by · on a line."""
    drawn: set[str] = set()
    folders: list[str] = []
    for line in page.partition("\nmpistrat/\n")[2].partition("```")[0].splitlines():
        found = re.match(r"((?:│   |    )*)[├└]── (\S+(?: · \S+)*)", line)
        if found is None:
            continue
        folders[len(found[1]) // 4 :] = []
        for name in found[2].split(" · "):
            if name.endswith("/"):
                folders.append(name)
            else:
                drawn.add("".join(folders) + name)
    return drawn
