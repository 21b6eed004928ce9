"""The program of a rank: it does what it is asked, and says what it has found."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from mpistrat.launch.bootstrap import start
from tests.crashes import saves
from tests.disagreements.ranks import connect


def main() -> None:
    """Record saves, or let their calls fail."""
    logging.getLogger("mpistrat").setLevel(logging.ERROR)  # without a line for each save
    comm = start()
    line, _ = connect()
    request = line.recv()
    strategy = saves.strategy_of(comm, request["shape"])
    with TemporaryDirectory(prefix="crashes-") as mine:
        root = Path(comm.bcast(mine))
        if request["does"] == "points":
            logs = saves.record(comm, strategy, root)
            calls = [sum(bool(step.path) for step in log) for log in logs]
            line.send({"rank": comm.rank, "calls": calls, "found": saves.after_each_stop(comm, logs)})
        else:
            for text in saves.fail_each(comm, strategy, root):
                line.send({"rank": comm.rank, "failed": text})
        comm.Barrier()
    line.send({"rank": comm.rank, "done": True})
    strategy.close()


if __name__ == "__main__":
    main()
