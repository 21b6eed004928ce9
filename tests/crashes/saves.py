"""The saves that are stopped, what is found after that, and errors of files that a job survives. Each rank calls these."""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import mpistrat
from mpistrat.checkpoint import files
from mpistrat.errors import CheckpointError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.strategy.strategy import Strategy
from mpistrat.topology.world import World
from tests.crashes.disk import Recorder, Step, after_stop, cuts, write_state

_NUM_SAVES = 3
_KEPT = 1  # so that each save removes the one before
# how files fail, and whether they do so until somebody mends it
ERRORS = ((errno.ENOSPC, True), (errno.EDQUOT, False), (errno.EROFS, True), (errno.EIO, False))


class State:
    """What is saved: values that all tell their step."""

    def __init__(self) -> None:
        self.values = {"step": 0, "big": np.zeros(40), "small": [np.zeros(3, np.int32), np.zeros((), np.float32)]}

    def set(self, step: int) -> None:
        self.values["step"] = step
        for array in self._arrays():
            array[...] = step

    def step(self) -> int:
        """Return the step of the values; -1 if they are of several."""
        found = {float(self.values["step"]), *(each for array in self._arrays() for each in np.unique(array).tolist())}
        return int(found.pop()) if len(found) == 1 else -1

    def _arrays(self) -> list[Any]:
        return [self.values["big"], *self.values["small"]]


def strategy_of(comm: Any, shape: str, options: mpistrat.experimental.CommunicationOptions | None = None) -> Strategy:
    return Strategy(mpistrat.StrategyExtended(mpistrat.Communicator(Hierarchy(comm, World.from_shape(shape)), options)))


def manager_of(strategy: Strategy, directory: Path, most: int = _KEPT) -> tuple[State, mpistrat.CheckpointManager]:
    """Return values, and what saves them to a directory."""
    state = State()
    with strategy.scope():
        return state, mpistrat.CheckpointManager(mpistrat.Checkpoint(state=state.values), directory, max_to_keep=most)


def record(comm: Any, strategy: Strategy, root: Path) -> list[list[Step]]:
    """Save some times, each removing the checkpoint before, and return what each rank did."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, root)
        state, manager = manager_of(strategy, root / "run" / "all")
        for step in range(1, _NUM_SAVES + 1):
            state.set(step)
            recorder.add("begun", value=step)
            manager.save(step, wait=True)
            recorder.add("returned", value=step)
        manager.close()
    return comm.allgather(recorder.steps)


def after_each_stop(comm: Any, logs: Sequence[Sequence[Step]]) -> tuple[int, int, list[str]]:
    """Look at all that may be on the disk when these ranks stop: return how many moments and contents, and what is wrong.

    Each rank of `comm` looks at some of them.
    """
    num_cuts, seen, wrong = 0, set[Any](), list[str]()
    alone = comm.Split(comm.rank)
    strategy = strategy_of(alone, "1x1")
    for cut in cuts(logs):
        num_cuts += 1
        steps = sorted((step for log, end in zip(logs, cut, strict=True) for step in log[:end]), key=lambda step: step.when)
        last = lambda kind, steps=steps: max((step.value for step in steps if step.kind == kind), default=0)  # noqa: E731
        begun, returned = last("begun"), last("returned")
        for content in after_stop(steps):
            key = (frozenset(content.items()), returned, begun)
            if key in seen:
                continue
            seen.add(key)
            if len(seen) % comm.size == comm.rank and (text := _wrong_after_stop(strategy, content, returned, begun)):
                wrong.append(f"at {cut}, after {steps[-1][:2] if steps else ''}: {text}; {sorted(content)}")
    strategy.close()
    alone.Free()
    return num_cuts, len(seen), [text for texts in comm.allgather(wrong) for text in texts]


def _wrong_after_stop(strategy: Strategy, content: dict[str, bytes | None], returned: int, begun: int) -> str:
    """Return what is wrong with a checkpoint, whose saves of these steps have returned and begun; an empty text if nothing."""
    quick = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=quick, ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        write_state(content, root)
        directory = root / "run" / "all"
        state, manager = manager_of(strategy, directory, most=5)
        try:
            restored = manager.restore()
            for path in manager.checkpoints:
                files.verify(Path(path))
            if not returned <= (restored or 0) <= begun or state.step() != (restored or 0):
                return f"saved {returned}, begun {begun}, restored {restored}, values of {state.step()}"
            state.set(begun + 1)
            manager.save(begun + 1, wait=True)
            state.set(0)
            if (manager.restore(), state.step()) != (begun + 1, begun + 1):
                return "the next save is not restored"
            left = {path.name for path in directory.iterdir()} - {Path(path).name for path in manager.checkpoints}
            return f"{sorted(left)} is left" if left else ""
        except CheckpointError as error:
            return str(error)
        finally:
            with suppress(CheckpointError):
                manager.close()


def fail_each(comm: Any, strategy: Strategy, root: Path, errors: Sequence[tuple[int, bool]] = ERRORS) -> Iterator[str]:
    """Let each call of each rank fail that a save makes; yield what was wrong here, and an empty text for each failure."""
    for number, lasts in errors:
        for failing in range(comm.size):
            place, was_reached = 0, True
            while was_reached:
                texts, was_reached = _fail(comm, strategy, root / f"{number}.{failing}.{place}", number, lasts, failing, place)
                yield from (f"{os.strerror(number)}, rank {failing}, call {place}: {text}" for text in texts)
                yield from [""] * was_reached
                place += 1


def _fail(
    comm: Any, strategy: Strategy, root: Path, number: int, lasts: bool, failing: int, place: int
) -> tuple[list[str], bool]:
    """Return what was wrong on this rank, and whether there was such a call."""
    state, manager = manager_of(strategy, root)
    state.set(1)
    manager.save(1, wait=True)
    count = 0

    def fail(kind: str, path: Path) -> None:
        nonlocal count
        count += 1
        if comm.rank == failing and (count == place + 1 or (lasts and count > place and kind not in ("unlink", "rmdir"))):
            if kind == "write":
                path.write_bytes(b"half")
            raise OSError(number, os.strerror(number), str(path))

    told = ""
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, root)
        state.set(2)
        recorder.before = fail
        try:
            manager.save(2, wait=True)
        except CheckpointError as error:
            told = str(error)
    counts, errors = comm.allgather(count), comm.allgather(told)
    wrong = []
    if len({bool(each) for each in errors}) > 1:
        wrong.append(f"only some ranks were told: {errors}")
    if told and f"rank {failing}" not in told:
        wrong.append(f"who has failed is not told: {told}")
    if state.step() != 2:
        wrong.append(f"the values are those of {state.step()}")
    if told and manager.latest_checkpoint != str(root / "ckpt-00000001"):
        wrong.append(f"the latest one is {manager.latest_checkpoint}")
    again, other = manager_of(strategy, root)
    wanted = 1 if told else 2
    if (other.restore(), again.step()) != (wanted, wanted):
        wrong.append(f"{wanted} is not what is restored, but {again.step()}; told: {told}")
    other.close()
    try:
        manager.save(2, wait=True)  # what has failed is tried again
        state.set(0)
        if (manager.restore(), state.step()) != (2, 2):
            wrong.append("what was saved again is not restored")
    except CheckpointError as error:
        wrong.append(f"saving again: {error}")
    manager.close()
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(root)
    return wrong, counts[failing] > place
