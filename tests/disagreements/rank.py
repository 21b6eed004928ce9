"""The program of a rank: it runs the cases that it is told to, and says how each ended on this rank."""

from __future__ import annotations

import json
import linecache
import os
import socket
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import mpistrat
from mpistrat.launch.bootstrap import start
from tests.disagreements.case import Case, Plan
from tests.disagreements.kinds import KINDS
from tests.disagreements.memory import Memory, Neighbours

# A difference may be told late: within so many further calls, or where values are read.
FURTHER_CALLS = 70
_FURTHER_COUNT = 33  # of no kind's arrays
_PACKAGE = str(Path(mpistrat.__file__).parent)


class Turns:
    """What this rank does when it is told, and the line to who tells it."""

    def __init__(self, lines: Any, rank: int, size: int, memory: Memory) -> None:
        self._lines, self._rank, self._size, self._memory = lines, rank, size, memory
        self._case: Case | None = None
        self._neighbours: Neighbours | None = None

    def say(self, **document: Any) -> None:
        """Send a line."""
        self._lines.write(json.dumps({"rank": self._rank, **document}) + "\n")
        self._lines.flush()

    def serve(self) -> None:
        """Do what is asked until there is no more, or a case ends the program."""
        self.say(pid=os.getpid())
        for line in self._lines:
            request = json.loads(line)
            if request["do"] == "case":
                plan = Plan(**request["plan"])
                if KINDS[plan.kind].alone:
                    self._to_the_end(plan)
                    return
                self.say(ended=self._attempt(plan))
            elif request["do"] == "look":
                self.say(foreign=self._neighbours.changed() if self._neighbours else [])
            else:
                self._leave(request["close"])
                self.say(left=True)

    def _attempt(self, plan: Plan) -> dict[str, Any]:
        """Run a case whose errors are what is looked for."""
        found: dict[str, Any] = {"stage": "strategy", "error": None}
        try:
            case = self._prepare(plan)
            found["stage"] = "disagreement"
            self.say(at="disagreement")
            KINDS[plan.kind].run(case)
            found["stage"] = "further calls"
            self.say(at="further calls", values=case.values)
            _go_on(case, found)
            found["stage"] = "over"
        except Exception as error:
            found["error"] = _described(error)
        found["values"] = self._case.values if self._case else []
        if self._case is not None:
            found["must_be_told"] = self._case.must_be_told
        return found

    def _to_the_end(self, plan: Plan) -> None:
        """Run a case that ends the program, whose errors nobody catches."""
        case = self._prepare(plan)
        self.say(at="disagreement")
        KINDS[plan.kind].run(case)
        self.say(at="end", values=case.values)

    def _prepare(self, plan: Plan) -> Case:
        self._memory.reset()
        self._neighbours = None
        strategy = mpistrat.MultiWorkerMirroredStrategy()
        case = Case(plan, self._rank, self._size, self._memory, strategy, lambda text: self.say(note=text))
        self._case = case
        self.say(at="strategy")
        found = KINDS[plan.kind]
        case.must_be_told = "right" not in found.allowed
        if plan.warm:
            case.in_step(lambda: self._call_equally(case))
        if any("wrong" in value for value in case.values):
            raise AssertionError(f"wrong without an odd rank: {case.values}")
        case.values.clear()
        self._neighbours = Neighbours(8 * plan.count)
        case.odd = plan.odd
        return case

    def _call_equally(self, case: Case) -> None:
        """Make one of the calls before the disagreement, and say so: large ones may be slow, and are no hang."""
        self.say(at="equal calls")
        KINDS[case.plan.kind].warm_up(case)

    def _leave(self, close: bool) -> None:
        if close and self._case is not None:
            self._case.strategy.close()
        self._case = self._neighbours = None


def _go_on(case: Case, found: dict[str, Any]) -> None:
    """Make further equal calls, and read values at last."""
    array = case.memory.array(_FURTHER_COUNT, "float64")
    for further in range(1, FURTHER_CALLS + 1):
        found["further"] = further
        case.fill(array)
        case.all_reduce("sum", array)
    found["further"] = "reduce"
    case.reduce("sum", np.array(case.component(case.rank, 5, "float64")))


def _described(error: Exception) -> dict[str, Any]:
    """Say what was raised, and whether it was this library that raised it, by a statement of its own."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return {
        "type": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "text": str(error)[:2000],
        "raised_by_us": frame.filename.startswith(_PACKAGE) and line.startswith("raise"),
        "where": f"{Path(frame.filename).name}:{frame.lineno}",
    }


def main() -> None:
    """Connect, and serve."""
    comm = start()
    folder = Path(os.environ["DISAGREEMENTS_FOLDER"])
    memory = Memory(folder / f"memory.{comm.rank}")
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(folder / "socket"))
        turns = Turns(stream.makefile("rw"), comm.rank, comm.size, memory)
        turns.serve()


if __name__ == "__main__":
    main()
