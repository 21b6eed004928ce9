"""One rank of a job that runs tests: ``python -m mpistrat.pytest.rank_main FILE``, started on every rank by `RankJob`."""

from __future__ import annotations

import json
import marshal
import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest

from mpistrat.launch import abort
from mpistrat.logger import StderrHandler, logger
from mpistrat.pytest.rank_session import RankSession

_POLL_SECONDS = 0.001


def main() -> int:
    """Run the tests that the file describes; return 0 if their results were sent, and else pytest's exit code."""
    job = marshal.loads(Path(sys.argv[1]).read_bytes())
    stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)  # before pytest captures it
    abort.say_on(stderr)
    logger.handlers[:] = [StderrHandler(stderr)]
    own = tempfile.mkdtemp(prefix="pytest-rank-", dir=job["folder"])
    config = pytest.Config.fromdictargs({**job["options"], "basetemp": own}, job["files"])
    # As in workers of pytest-xdist, plugins that write files leave that to the process that has started the job.
    config.workerinput = {"workerid": "rank"}  # type: ignore[attr-defined]
    with Path(job["reports"]).open("a") as reports, Path(job["asked"]).open() as asked:
        session = RankSession(config, partial(_next_test, asked, job["asker"]), partial(_send, reports))
        config.pluginmanager.register(session, RankSession.NAME)
        code: int = config.hook.pytest_cmdline_main(config=config)
    shutil.rmtree(own, ignore_errors=True)
    return 0 if code == pytest.ExitCode.TESTS_FAILED else code


def _send(reports: TextIO, document: object) -> None:
    print(json.dumps(document, default=str), file=reports, flush=True)


def _next_test(asked: TextIO, asker: int) -> tuple[str, str | None] | None:
    """Wait for the next test, and return it and the one that follows; None at the end, or if the asker is gone."""
    line = ""
    while not line.endswith("\n"):
        line += asked.readline()
        try:
            os.kill(asker, 0)
        except ProcessLookupError:
            return None
        time.sleep(_POLL_SECONDS)
    found: tuple[str, str | None] | None = json.loads(line)
    return found


if __name__ == "__main__":
    sys.exit(main())
