"""The program of a rank: it runs the cases that it is told to, and says how each ended on this rank."""

import linecache
import traceback
from pathlib import Path
from typing import Any

import mpistrat
from mpistrat.launch.bootstrap import start
from tests.disagreements.calls import Call, make
from tests.disagreements.case import Case, Plan
from tests.disagreements.kinds import KINDS, kind_of
from tests.disagreements.memory import Memory, Neighbours
from tests.disagreements.ranks import connect

WARM_ROUNDS = 20
# A difference may be told late: within so many further calls, or where values are read.
FURTHER_CALLS = 70
_FURTHER = Call("all_reduce", (33,))  # of no kind's arrays
_READ = Call("reduce", (5,))


class Turns:
    """What this rank does when it is told, and the line to who tells it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._line, folder = connect()
        self._memory = Memory(folder / f"memory.{rank}")
        self._case: Case | None = None
        self._neighbours: Neighbours | None = None

    def say(self, **document: Any) -> None:
        self._line.send({"rank": self._rank, **document})

    def serve(self) -> None:
        """Do what is asked until a case ends the program."""
        while True:
            request = self._line.recv()
            if request["do"] == "case":
                plan: Plan = request["plan"]
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
        """Run a case whose errors are what is looked for; after it make further equal calls, and read values at last."""
        found: dict[str, Any] = {"error": None}
        try:
            case, usual, odd = self._prepare(plan)
            self.say(at="disagreement")
            case.play(usual, odd, make)
            self.say(at="further calls", values=case.values)
            for further in range(1, FURTHER_CALLS + 2):
                found["further"] = further
                call = _FURTHER if further <= FURTHER_CALLS else _READ
                case.play([call], [call], make)
        except Exception as error:
            found["error"] = _described(error)
        found["values"] = self._case.values if self._case else []
        return found

    def _to_the_end(self, plan: Plan) -> None:
        """Run a case that ends the program, whose errors nobody catches."""
        case, usual, odd = self._prepare(plan)
        self.say(at="disagreement")
        case.play(usual, odd, make)
        self.say(at="end", values=case.values)

    def _prepare(self, plan: Plan) -> tuple[Case, list[Call], list[Call]]:
        """Return a case with a strategy, after equal calls if it is a warm one; and what ranks call in it."""
        self._memory.reset()
        self._case = self._neighbours = None
        self._case = case = Case(plan, self._rank, self._size, self._memory, mpistrat.MultiWorkerMirroredStrategy())
        self.say(at="strategy")
        kind = kind_of(plan, self._size)
        others = [[Call("all_reduce", (plan.count,))]]
        before = {"usual": [kind.usual], "both": [kind.usual, kind.odd], "other": others}[kind.warm]
        for _ in range(WARM_ROUNDS if plan.warm else 0):
            self._memory.reset()
            for calls in before:
                self.say(at="equal calls")  # large ones may be slow, and are no hang
                case.play(calls, calls, make)
        self._memory.reset()
        if any("wrong" in value for value in case.values):
            raise AssertionError(f"wrong without an odd rank: {case.values}")
        case.values.clear()
        self._neighbours = Neighbours(8 * plan.count)
        case.odd = plan.odd
        return case, kind.usual, kind.odd

    def _leave(self, close: bool) -> None:
        if close and self._case is not None:
            self._case.strategies[0].close()
        self._case = self._neighbours = None


def _described(error: Exception) -> dict[str, Any]:
    """Say what was raised, and whether it was this library that raised it, by a statement of its own."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return {
        "type": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "text": str(error)[:2000],
        "raised_by_us": frame.filename.startswith(str(Path(mpistrat.__file__).parent)) and line.startswith("raise"),
        "where": f"{Path(frame.filename).name}:{frame.lineno}",
    }


if __name__ == "__main__":
    comm = start()
    Turns(comm.rank, comm.size).serve()
