"""Quality gates: style, types, import contracts, packaging, the cost of an import, and what users see."""

import importlib
import importlib.metadata
import inspect
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mpistrat
from mpistrat.experimental.partitioners import FixedShardsPartitioner
from mpistrat.lazy import LazyModule
from mpistrat.parameter_server.coordinator import ClusterCoordinator
from tests.mistakes import mistakes
from tests.processes import python, run_bounded

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT / "mpistrat"
_MODULES = sorted(_PACKAGE.rglob("*.py"))

_GATES = {
    "style": ["ruff", "check", "--no-cache", "."],
    "layout": ["ruff", "format", "--check", "--no-cache", "."],
    "types": ["mypy"],
    "contracts": ["lint-imports", "--no-cache"],
    "docstrings": ["numpydoc", "lint", *map(str, _MODULES)],
}
_MAX_IMPORT_SECONDS = 0.1
_WITHOUT_EXTRAS = """
import sys

sys.path.insert(0, sys.argv[1])
import mpistrat
from mpistrat import cluster_resolver, experimental

assert mpistrat.__file__.startswith(sys.argv[1])
assert experimental.CommunicationOptions()
assert not [name for name in sys.modules if name.startswith("mpistrat.parameter_server")], "imported for nothing"
modules = [mpistrat, mpistrat.errors, cluster_resolver, experimental, experimental.coordinator, experimental.partitioners]
for module in modules:
    for name in module.__all__:
        getattr(module, name)
assert "cloudpickle" not in sys.modules
"""


@pytest.mark.parametrize("gate", _GATES)
def test_gate(gate):
    program, *arguments = _GATES[gate]
    done = run_bounded([str(Path(sysconfig.get_path("scripts")) / program), *arguments], 240, cwd=_ROOT)
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


def test_the_wheel_has_the_package_and_nothing_else_the_archive_the_license_and_the_index_would_take_them(distributions):
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [*_MODULES, _PACKAGE / "py.typed", _PACKAGE / "device" / "kernels.cu"]
    assert names == {str(path.relative_to(_ROOT)) for path in files}
    (source,) = distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.getnames())
    files = [str(path) for path in sorted(distributions.iterdir())]
    assert [path.rpartition(".")[2] for path in files] == ["whl", "gz"]
    done = run_bounded([sys.executable, "-m", "twine", "check", "--strict", *files], 60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_with_the_base_dependencies_alone_every_public_name_is_there(distributions, tmp_path):
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    _link_dependencies(found, tmp_path)
    done = run_bounded([sys.executable, "-I", "-S", "-c", _WITHOUT_EXTRAS, str(tmp_path)], 60)
    assert done.returncode == 0, done.stderr


def _link_dependencies(distribution, folder):
    """Link what a distribution needs without its extras into a folder, where Python finds nothing else."""
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed = importlib.metadata.distribution(requirement.name)
            for name in {path.parts[0] for path in needed.files if path.parts[0] not in ("..", "__pycache__")}:
                if not (folder / name).exists():
                    (folder / name).symlink_to(needed.locate_file(name))
            _link_dependencies(needed, folder)


def test_importing_the_package_is_nearly_free():
    program = (
        "import time, numpy, sys; start = time.perf_counter(); import mpistrat; print(time.perf_counter() - start); "
        "print(*sorted({'mpi4py', 'cupy', 'torch', 'jax', 'mpistrat.launch.bootstrap'} & set(sys.modules)))"
    )
    texts = [python(program).stdout for _ in range(5)]
    seconds = sorted(float(text.splitlines()[0]) for text in texts)
    assert {text.splitlines()[1] for text in texts} == {""}, "the import started MPI or CUDA"
    assert seconds[len(seconds) // 2] < _MAX_IMPORT_SECONDS, seconds


def test_every_public_name_is_there():
    package = importlib.import_module("mpistrat")
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        public = getattr(package, name)
        assert public.__doc__, f"mpistrat.{name} has no docstring"
        for member, value in vars(public).items() if isinstance(public, type) else ():
            assert member.startswith("_") or not callable(value) or inspect.getdoc(getattr(public, member)), f"{name}.{member}"
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=r"module 'mpistrat' has no attribute 'Strategie'; it has .*Strategy"):
        _ = package.Strategie


def test_the_architecture_page_names_every_package():
    page = (_ROOT / "docs" / "explanation" / "architecture.md").read_text()
    packages = [path.parent.name for path in sorted(_PACKAGE.glob("*/__init__.py"))]
    assert [name for name in packages if f"`{name}`" not in page] == []


def test_the_text_of_each_planted_mistake_stands_in_its_file_once():
    moved = [one for one in mistakes() if (_PACKAGE / one.file).read_text().count(one.old) != 1]
    assert not moved, "\n".join(f"{one.file}: {one.old!r}; change tests/mistakes/planted.txt" for one in moved)


LAUNCH = "import mpistrat.topology.world; from mpistrat.launch import abort, bootstrap, environment, mpiexec, openmpi"
ONE_DEVICE = (
    "import mpistrat, numpy; strategy = mpistrat.OneDeviceStrategy(); "
    "strategy.run(lambda: mpistrat.get_replica_context().all_reduce('sum', numpy.ones(3)))"
)
ARRAYS = "from mpistrat.arrays import as_array, as_operand, like; like(as_array(memoryview(b'ab')), 1.0)"
GROUPS = "import mpistrat.parameter_server.strategy, mpistrat.lazy; assert not hasattr(mpistrat.lazy.MPI, '__wrapped__')"
PLAN = "from mpistrat.tools.cli import main; main(['plan', '--world', '4x8', '--bytes', '64MiB'])"


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        ("import mpistrat.tools.run", ["mpi4py", "numpy"]),
        ("; ".join((LAUNCH, PLAN, ARRAYS, ONE_DEVICE)), ["mpi4py", "cupy", "torch", "jax"]),
        ("from mpistrat.tools.cli import main; main(['info', '--json'])", ["mpi4py.MPI"]),
        (GROUPS, ["mpi4py.MPI"]),
    ],
)
def test_what_is_not_needed_is_not_imported(program, unneeded):
    done = python(f"import sys; {program}; sys.exit(' '.join({{*{unneeded}}} & {{*sys.modules}}))")
    assert done.stderr.strip() == ""


def test_why_a_module_cannot_be_imported_is_told_where_it_is_first_used(tmp_path, monkeypatch):
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "mpi.py").write_text("raise ImportError('no libmpi.so')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"no libmpi\.so"):
        LazyModule("a_package.mpi").COMM_WORLD  # noqa: B018 - what uses it


@pytest.mark.parametrize(("module", "known"), [("coordinator", ClusterCoordinator), ("partitioners", FixedShardsPartitioner)])
def test_what_tensorflow_has_as_a_module_is_one(module, known):
    imported = importlib.import_module(f"mpistrat.experimental.{module}")
    assert imported is getattr(mpistrat.experimental, module)
    assert getattr(imported, known.__name__) is known
