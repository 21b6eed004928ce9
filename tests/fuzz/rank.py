"""The program of a rank: it plays cases from one number to another, and says where it is and what was wrong."""

import os
import traceback

import numpy as np

from mpistrat.launch.bootstrap import start
from tests.disagreements.ranks import connect
from tests.fuzz.cases import Field


def main() -> None:
    """Play the cases; what is raised unexpectedly ends the job."""
    comm = start()
    line, _ = connect()
    request = line.recv()
    if os.environ.get("FUZZ_RAISES") == "1":
        np.seterr(all="raise")
    field = Field(comm, request["seed"])
    for number in range(request["first"], request["stop"]):
        field.note = ""
        line.send({"rank": comm.rank, "at": number})
        try:
            field.play(number)
        except AssertionError as error:
            line.send({"rank": comm.rank, "at": number, "failed": f"{field.note}\n    {str(error).strip()[-700:]}"})
        except BaseException as error:
            text = "".join(traceback.format_exception(error)[-6:])
            line.send({"rank": comm.rank, "at": number, "failed": f"{field.note}\n    {text.strip()[-700:]}"})
            raise
    line.send({"rank": comm.rank, "at": request["stop"]})
    field.close()


if __name__ == "__main__":
    main()
