"""Run test suites of public MPI libraries, with and without a wrapped ``MPI.COMM_WORLD``: ``python -m tests.interop``.

Each library is installed in a folder of its own, beside the packages of this environment; its tests, which are not changed,
come from its source archive.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.processes import run_bounded

ROOT = Path(__file__).parents[2]
SECONDS = 1500.0


@dataclass(frozen=True)
class Suite:
    archive: str  # the library, with its version
    tests: tuple[str, ...]  # files or folders, from the top of its source archive; ``*`` stands for any characters
    packages: tuple[str, ...] = ()  # what is installed beside the packages of this environment
    environ: dict[str, str] = field(default_factory=dict)  # variables that tell it to compute on the CPU
    plugins: tuple[str, ...] = ()  # plugins of pytest that its tests need here, wrapped or not


_MPI4PY = ("test/test_cco_*.py", "test/test_comm*.py", "test/test_op.py", "test/test_p2p_*.py")
SUITES = {
    "mpi4py": Suite(f"mpi4py=={version('mpi4py')}", _MPI4PY, plugins=("tests.interop.host_arrays",)),
    # it is built by a C compiler with the headers of FFTW; its tests of files are none of pytest's
    "mpi4py-fft": Suite("mpi4py-fft==2.0.6", ("tests/test_[!is]*.py",), ("mpi4py-fft==2.0.6", "pyfftw")),
    "pylops-mpi": Suite(
        "pylops-mpi==0.8.0",
        ("tests",),
        ("pylops-mpi==0.8.0", "pylops>=2.8", "pyproximal"),
        {"CUPY_PYLOPS": "0", "NCCL_PYLOPS_MPI": "0"},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.interop", description=__doc__)
    parser.add_argument("--library", choices=SUITES, action="append", help="one of them; again for more (default: all)")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/mpistrat-interop"), help="where they are installed")
    parser.add_argument("-k", default="", help="pytest's selection")
    asked = parser.parse_args()
    for name in asked.library or SUITES:
        folder = asked.folder / name
        source = _install(SUITES[name], folder)
        for ranks in map(int, asked.ranks.split(",")):
            for wrapped in (False, True):
                print(f"{name}, {ranks} ranks, {'wrapped' if wrapped else 'as it is'}: ", end="", flush=True)
                print(_run(SUITES[name], folder, source, ranks, wrapped, asked.k), flush=True)


def _install(suite: Suite, folder: Path) -> Path:
    """Install what a suite needs below a folder, and return the folder of its tests, where the library itself is not."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    if suite.packages and not (folder / "site").exists():
        subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), *suite.packages], check=True)
    name = suite.archive.partition("==")[0]
    archive = ["--no-deps", "--no-binary", name, "--dest", str(folder / "archives"), suite.archive]
    subprocess.run([*pip, "download", *archive], check=True)
    [found] = (folder / "archives").glob("*.tar.gz")
    source, folders = found.name.removesuffix(".tar.gz"), {tests.partition("/")[0] for tests in suite.tests}
    with tarfile.open(found) as archived:
        members = [member for member in archived if Path(member.name).parts[:2] in {(source, tests) for tests in folders}]
        archived.extractall(folder / "source", members, filter="data")
    return folder / "source" / source


def _run(suite: Suite, folder: Path, source: Path, ranks: int, wrapped: bool, selection: str) -> str:
    """Return how the tests ended, as rank 0 says it."""
    tests = [str(found) for pattern in suite.tests for found in sorted(source.glob(pattern))]
    plugins = [f"-p{plugin}" for plugin in (*suite.plugins, *(["tests.interop.wrapped_world"] if wrapped else []))]
    line = [sys.executable, "-m", "mpistrat", "run", "-n", str(ranks), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # its conftest.py adds ranks to the names of tests, by an attribute that today's pytest has not
    line += ["--noconftest", "--continue-on-collection-errors", "--color=no"]
    line += ["--with-mpi", *plugins, *tests, *(["-k", selection] if selection else [])]
    # the library last: what both have is that of this environment
    environ = dict(os.environ) | suite.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'site'}"}
    done = run_bounded(line, SECONDS, environ, source)
    (folder / f"{ranks}-{'wrapped' if wrapped else 'plain'}.log").write_text(done.stdout + done.stderr)
    ends = re.findall(r"^.*\d+ (?:passed|failed|skipped|error).*$", done.stdout, re.MULTILINE)
    made = re.findall(r"made by mpistrat: .*", done.stdout)
    return "; ".join([ends[-1] if ends else f"ended with {done.returncode}", *made])


if __name__ == "__main__":
    main()
