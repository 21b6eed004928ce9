"""Jobs that save all the time, and are ended by SIGKILL at random instants; each continues what the one before has left."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import mpistrat
from mpistrat.checkpoint import files
from mpistrat.errors import CheckpointError
from tests.crashes.saves import State, manager_of
from tests.disagreements.places import Place, default_environment
from tests.disagreements.ranks import Ranks, connect
from tests.processes import patient

_DIRECTORY = "CRASHES_DIRECTORY"  # a variable of the ranks
_ELEMENTS = 1 << 17
_MOST_SECONDS = 0.6  # until the kill, from the first save on
_END_SECONDS = 30.0


def run(shapes: Sequence[str], num_jobs: int, seed: int) -> Iterator[tuple[str, str]]:
    """Run jobs of shapes in turn; yield for each what was restored, and what was wrong.

    That is ``previous``, the last one whose save was known to be durable, or ``last``, one after it; or ``wrong``.
    """
    rng, step = random.Random(seed), 0
    with TemporaryDirectory(prefix="crashes-") as folder:
        for number in range(num_jobs):
            shape = shapes[number % len(shapes)]
            begun, durable, texts = _killed_job(Place(shape), Path(folder), rng)
            texts += [] if begun else [f"the job has saved nothing: {step}"]
            found, wrong = _restored(Path(folder))
            if wrong or not max(durable, step) <= found <= max(begun, step):
                texts.append(f"restored {found} {wrong}, durable {durable}, begun {begun}, before {step}")
            step = found
            if texts:
                yield "wrong", f"job {number} of {shape}: {'; '.join(texts)}"
            else:
                yield "last" if found > durable else "previous", ""


def _killed_job(place: Place, directory: Path, rng: random.Random) -> tuple[int, int, list[str]]:
    """Run a job and kill one of its ranks, or all of them; return the last steps whose save has begun and returned."""
    settings = {"MPISTRAT_TUNING": "off", "MPISTRAT_DEVICE": "cpu", _DIRECTORY: str(directory)}
    ranks = Ranks(place, "tests.crashes.kills", default_environment(settings))
    words: dict[str, int] = {"begun": 0, "durable": 0}
    pids: dict[int, int] = {}
    victims = rng.choice([range(place.size), [rng.randrange(place.size)]])
    delay, timer = rng.uniform(0, _MOST_SECONDS), None

    def kill() -> None:
        for rank in victims:
            with suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)

    try:
        deadline = time.monotonic() + patient(_END_SECONDS)
        while (ranks.lines or ranks.process.poll() is None) and time.monotonic() < deadline:
            for said in ranks.receive():
                pids[said.pop("rank")] = said.pop("pid")
                words.update(said)
            if timer is None and words["begun"] and len(pids) == place.size:
                timer = threading.Timer(delay, kill)
                timer.start()
        hangs = ranks.process.poll() is None
        return words["begun"], words["durable"], [f"it has not ended: {ranks.output()[-3000:]}"] if hangs else []
    finally:
        ranks.end()


def _restored(directory: Path) -> tuple[int, str]:
    """Return the step that is restored, and what is wrong with it."""
    state = State(_ELEMENTS)
    manager = mpistrat.CheckpointManager(mpistrat.Checkpoint(state=state.values), directory)
    try:
        found = manager.restore() or 0
        for path in manager.checkpoints:
            files.verify(Path(path))
    except CheckpointError as error:
        return -1, str(error)
    return found, "" if state.step() == found else f"with values of {state.step()}"


def main() -> None:
    """Continue, and save at every step, until somebody kills this rank."""
    line, _ = connect()
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    rank = strategy.extended.communicator.rank
    state, manager = manager_of(strategy, Path(os.environ[_DIRECTORY]), 2, _ELEMENTS)
    step = manager.restore() or 0
    if state.step() != step:
        sys.exit(f"{step} was restored, with values of {state.step()}")
    line.send({"rank": rank, "pid": os.getpid()})
    while True:
        step += 1
        state.set(step)
        if rank == 0:
            line.send({"rank": rank, "pid": os.getpid(), "begun": step})
        manager.save(step)
        if rank == 0 and manager.latest_checkpoint:
            durable, _ = files.place_of(Path(manager.latest_checkpoint))
            line.send({"rank": rank, "pid": os.getpid(), "durable": durable})


if __name__ == "__main__":
    main()
