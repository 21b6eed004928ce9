"""Plant each mistake in a copy of the repository, run its test there, and say which were not found.

``python -m tests.mistakes [TEXT]``: those of whose file or test the text is a part, or all; ``--show``: what pytest says.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.mistakes import ROOT, Mistake, mistakes
from tests.processes import run_bounded

SECONDS = 300.0


def main() -> int:
    """Return the exit code: 1 if a mistake was not found."""
    wanted, show = [word for word in sys.argv[1:] if word != "--show"], "--show" in sys.argv
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        copy = Path(folder) / ROOT.name
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        chosen = [one for one in mistakes() if all(word in f"{one.file} {one.test}" for word in wanted)]
        missed = [one for one in chosen if not is_found(one, copy, show)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} were found")
    return int(bool(missed))


def is_found(mistake: Mistake, copy: Path, show: bool) -> bool:
    """Return whether the test fails with the mistake, or does not end."""
    path, began = copy / "mpistrat" / mistake.file, time.monotonic()
    right = path.read_text()
    path.write_text(right.replace(mistake.old, mistake.new))
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider", *mistake.test.split()]
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": ""}
    done = run_bounded(argv, SECONDS, environ, copy)
    path.write_text(right)
    found = done.returncode in (1, 124)
    took = f"{time.monotonic() - began:.0f} s"
    print(f"{'found' if found else 'NOT FOUND'} in {took}: {mistake.file}: {mistake.old!r} by {mistake.test}", flush=True)
    if show or not found:
        print("\n".join(done.stdout.splitlines()[-12:]), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
