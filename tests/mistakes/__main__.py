"""Plant each mistake in a copy of the repository, run its test there, and say which were not found.

``python -m tests.mistakes [TEXT]``: those of whose file or test the text is a part, or all.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.mistakes import ROOT, Mistake, mistakes
from tests.processes import TIMED_OUT, run_bounded


def main() -> int:
    """Return the exit code: 1 if a mistake was not found, or none was chosen."""
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        copy = Path(folder) / ROOT.name
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        chosen = [one for one in mistakes() if all(word in f"{one.file} {one.test}" for word in sys.argv[1:])]
        missed = [one for one in chosen if not is_found(one, copy)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} were found")
    return int(bool(missed) or not chosen)


def is_found(mistake: Mistake, copy: Path) -> bool:
    """Return whether the test fails with the mistake, or does not end."""
    path, began = copy / "mpistrat" / mistake.file, time.monotonic()
    right = path.read_text()
    path.write_text(right.replace(mistake.old, mistake.new))
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider", *mistake.test.split()]
    environ = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": ""}
    done = run_bounded(argv, 300.0, environ, copy)
    path.write_text(right)
    found = done.returncode in (1, TIMED_OUT)
    by = re.search(r"^(?:FAILED )?(tests/[\w/]+\.py::\w+)", done.stdout, re.MULTILINE)
    verdict = f"found by {by[1] if by else mistake.test}" if found else f"NOT FOUND by {mistake.test}\n{done.stdout[-500:]}"
    print(f"{time.monotonic() - began:3.0f} s: {mistake.file}: {mistake.old!r}: {verdict}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
