"""The program of a rank: it plays cases from one number to another, and writes down where it is and what was wrong."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import numpy as np

from mpistrat.launch.bootstrap import start
from tests.fuzz.cases import Field

_PROGRESS_BYTES = 2000


def main(folder: Path, seed: int, first: int, stop: int) -> None:
    """Play the cases; what is raised unexpectedly ends the job."""
    comm = start()
    if os.environ.get("FUZZ_RAISES") == "1":
        np.seterr(all="raise")
    field = Field(comm, seed)
    progress = os.open(folder / f"progress.{comm.rank}", os.O_CREAT | os.O_WRONLY)
    with (folder / f"failures.{comm.rank}").open("a") as failures:
        for number in range(first, stop):
            field.note = ""
            os.pwrite(progress, f"{number}".ljust(_PROGRESS_BYTES).encode(), 0)
            try:
                field.play(number)
            except AssertionError as error:
                print(f"{number}\t{field.note}\t{str(error)[:1500]!r}", file=failures, flush=True)
            except BaseException as error:
                text = "".join(traceback.format_exception(error)[-6:])
                print(f"{number}\t{field.note}\t{text[-2500:]!r}", file=failures, flush=True)
                raise
    os.pwrite(progress, f"{stop}".ljust(_PROGRESS_BYTES).encode(), 0)
    field.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
