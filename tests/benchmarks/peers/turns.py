"""What every competing program does: wait for requests without using the processor, and answer them, until told no more.

It needs nothing but the standard library, for it runs in the environment of each peer. All ranks of all programs of a contest
are connected to the one that asks. See tests/benchmarks/contest.py for that side.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any


@dataclass(frozen=True)
class Task:
    run: Callable[[], object]  # one repetition
    is_right: Callable[[], bool]  # looks at what the last repetition left, and spoils it
    meet: Callable[[], object]  # waits until all ranks are here
    facts: Mapping[str, Any] | None = None  # said once, with the first answer


def is_right(targets: Any, expected: float) -> bool:
    """Return whether every element of arrays, of NumPy or PyTorch, is the sum, and spoil them."""
    right = all(bool((target == expected).all()) for target in targets)
    for target in targets:
        target[...] = float("nan")
    return right


def serve(
    rank: int,
    versions: Mapping[str, str],
    tasks: Mapping[str, Callable[[dict[str, Any]], Task]],
    calls: Mapping[str, Callable[..., Any]] | None = None,
) -> None:
    """Answer requests until there are no more."""
    with Client(os.environ["CONTEST_SOCKET"], "AF_UNIX") as line, suppress(EOFError, ConnectionError):
        line.send({"rank": rank, "versions": dict(versions)})
        kept: dict[str, Task] = {}
        while True:
            request = line.recv()
            try:
                answer = _answer(request, tasks, calls or {}, kept)
            except BaseException:
                line.send({"error": traceback.format_exc()})
                raise
            line.send(answer)


def _answer(request: dict[str, Any], tasks: Any, calls: Any, kept: dict[str, Task]) -> dict[str, Any]:
    if request["do"] == "call":
        return {"value": calls[request["name"]](**request["arguments"])}
    if request["do"] == "forget":
        kept.clear()  # and with the tasks their arrays
        return {}
    key = json.dumps(request["task"], sort_keys=True)
    if request["do"] == "prepare":
        kept[key] = tasks[request["task"]["kind"]](request["task"])
        kept[key].is_right()  # spoils what is there
    if request["do"] in ("prepare", "again"):
        [seconds] = _time(kept[key], 0, 1)
        return {"seconds": seconds, "right": kept[key].is_right(), "facts": dict(kept[key].facts or {})}
    return {"seconds": _time(kept[key], request["warm"], request["repeats"])}


def _time(task: Task, warm: int, repeats: int) -> list[float]:
    times = []
    for _ in range(warm + repeats):
        task.meet()
        started = time.perf_counter()
        task.run()
        times.append(time.perf_counter() - started)
    return times[warm:]
