"""PreemptionCheckpointHandler: all ranks save at the same step and leave, when one is told to end, or the time limit is near.

A signal handler sets a flag, nothing more. At the end of each step every rank starts a nonblocking maximum of the votes of all,
and completes the one that it started a step earlier: so all learn the same at the end of the same step, whichever ranks were
told and when, and a step waits for no rank that is less than a step behind.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from mpistrat import ending
from mpistrat.checkpoint.checkpoint import Checkpoint, CheckpointManager
from mpistrat.cluster_resolver import ClusterResolver
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.context.stack import has_strategy, in_cross_replica_context, misplaced
from mpistrat.errors import CheckpointError, InvalidArgumentError, MpistratError
from mpistrat.groups.group import keep_alive_for_peers
from mpistrat.launch import abort
from mpistrat.launch.abort import RESTART_EXIT_CODE
from mpistrat.launch.end_of_job import ENDING, Signals, seconds_left
from mpistrat.launch.environment import detect
from mpistrat.lazy import MPI
from mpistrat.logger import logger
from mpistrat.steps import drive, until
from mpistrat.watch import watcher
from mpistrat.watch.recorder import watched

T = TypeVar("T")

_HANDLED = set(signal.Signals) - {signal.SIGINT, signal.SIGKILL, signal.SIGSTOP}
# A vote is a number: the level, the cause and the rank, of which the maximum is what all do.
_GO_ON, _SAVE, _LEAVE = range(3)
_TIME_LIMIT, _WATCHER = 254, 255  # causes that are no signals
_LEVEL_BITS, _CAUSE_BITS = 40, 32
# what is kept in reserve for the end, besides the time that steps and saves take: seconds, or a part of short limits
_RESERVE_SECONDS, _RESERVE_PART = 30.0, 0.05
_STEPS_AHEAD, _SAVES_AHEAD = 3, 2  # the result is known after another step; a save may take longer than before


@dataclass(frozen=True)
class TerminationConfig:
    """How a job ends when it is told to.

    Attributes
    ----------
    termination_watcher_fn : callable, optional
        Is called at the end of each step, and returns whether this rank is told to end, besides by signals.
    exit_fn : callable, optional
        Ends the program after the last save; by default ``sys.exit(RESTART_EXIT_CODE)``, which is 42.
    grace_period : float, optional
        The seconds from the signal until the job is ended. With None or 0 it saves and leaves at once; else it saves, trains on
        until the time is nearly over, saves again, and leaves.
    save_fn : callable, optional
        Saves instead of ``manager.save(total_run_calls, wait=True)``. All ranks call it together.
    signals : sequence of signal.Signals
        By which a rank is told to end. TensorFlow, which does not have this argument, takes SIGTERM.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None
    signals: Sequence[int] = ENDING

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            if not callable(value := getattr(self, name) or int):
                raise InvalidArgumentError(f"{name} must be a function or None; got {value!r}")
        grace: Any = 0.0 if self.grace_period is None else self.grace_period
        if not isinstance(grace, Real) or not float(grace) >= 0.0:
            raise InvalidArgumentError(f"grace_period must be seconds >= 0, or None; got {self.grace_period!r}")
        if not isinstance(self.signals, Collection) or not _HANDLED.issuperset(self.signals):
            raise InvalidArgumentError(
                "signals must be a sequence of such that programs can handle, and not Ctrl-C's, for example "
                f"(signal.SIGTERM,); got {self.signals!r}"
            )


class PreemptionCheckpointHandler:
    """Saves and leaves, on all ranks at the same step, when one of them is told to end. Making one is a collective call.

    It restores the newest checkpoint, and counts on from its step. A signal to one rank is enough; several ranks, and further
    signals, change nothing. Under SLURM, and with MPISTRAT_TIME_LIMIT, it leaves before the job's time is over, as early as the
    steps and saves of this run have taken. All ranks must take equally many steps. Where they are a part of the job, the first
    of them that exits ends all of it.

    One handler watches at a time: a new one closes the one before, and does what that was told. It is made on the main thread.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        Is not used: the checkpoint knows its ranks.
    checkpoint_or_manager : Checkpoint or CheckpointManager
        What is saved. Other saves to the same directory have `total_run_calls` for a step, too: the newest is the highest one.
    checkpoint_dir : path, optional
        Of a Checkpoint the directory, in which the newest one is kept.
    termination_config : TerminationConfig, optional
        Which signals, and how to end.

    Raises
    ------
    InvalidArgumentError
        If an argument is invalid, or `checkpoint_dir` is missing or unwanted.
    CheckpointError
        On all ranks, if the newest checkpoint cannot be restored.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        global _active
        made, config = checkpoint_or_manager, termination_config or TerminationConfig()
        checkpoint = made._checkpoint if isinstance(made, CheckpointManager) else made
        wrong = InvalidArgumentError(
            f"a CheckpointManager, or a Checkpoint and its checkpoint_dir, are needed; got {type(made).__name__} and "
            f"{checkpoint_dir!r}\n"
            "    incorrect:  PreemptionCheckpointHandler(None, mpistrat.Checkpoint(weights=weights))\n"
            '    correct:    PreemptionCheckpointHandler(None, mpistrat.Checkpoint(weights=weights), "checkpoints")'
        )
        if not isinstance(checkpoint, Checkpoint):
            raise wrong

        def checked() -> tuple[None, str]:
            if isinstance(made, CheckpointManager) is not (checkpoint_dir is None):
                raise wrong
            if not isinstance(config, TerminationConfig):
                raise InvalidArgumentError(f"termination_config must be a TerminationConfig or None; got {config!r}")
            directory = None if checkpoint_dir is None else os.fspath(checkpoint_dir)
            return None, f"checkpoint_dir={directory!r}, grace_period={config.grace_period}"

        communicator = checkpoint._communicator
        communicator.agree_on("PreemptionCheckpointHandler", checked)
        self._checkpoint, self._config, self._rank = checkpoint, config, communicator.rank
        first = None
        if _active is not None:
            first = _active._take_unheeded()
            _active.close()
        self._votes = _Votes(communicator)
        self._signals, self._has_acted = Signals(config.signals), False
        self._signals.first = self._signals.first or first
        _active = self
        try:
            self._manager = CheckpointManager(made, checkpoint_dir or "", 1) if isinstance(made, Checkpoint) else made
            self._total_run_calls = self._manager.restore() or 0
        except MpistratError:  # raised on all ranks
            self.close()
            raise
        self._has_saved, self._saved_seconds, self._step_seconds, self._begun = False, 0.0, 0.0, math.nan
        left = seconds_left(os.environ) if self._rank == 0 else math.inf
        self._limit = time.monotonic() + left, left

    @property
    def total_run_calls(self) -> int:
        """How many steps were taken, in the runs before this one too: the step of what is saved next."""
        return self._total_run_calls

    def run(self, step_fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Take a step, ``step_fn(*args, **kwargs)``, and return its result. Then save and leave, if a rank was told to end.

        A collective call, outside ``strategy.run``.
        """
        result = step_fn(*args, **kwargs)
        self.save_checkpoint_if_preempted()
        return result

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Take what is in the ``with`` block as a step: see `run`. A collective call."""
        yield
        self.save_checkpoint_if_preempted()

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """End a step: what `run` does after it. A collective call. The arguments are for `save_fn`."""
        if has_strategy() and not in_cross_replica_context():
            raise misplaced("handler.run", "outside strategy.run")
        self._total_run_calls += 1
        if self is not _active:
            return
        now = time.monotonic()
        if self._begun < now:
            self._step_seconds = max(now - self._begun, 0.9 * self._step_seconds)
        agreed = self._votes.exchange(self._vote(now))
        level = agreed >> _LEVEL_BITS
        if level == _LEAVE or (level == _SAVE and not self._has_saved):
            self._has_acted = True
            self._save(args, kwargs)
            self._has_saved = True
            self._tell(agreed)
        if level == _LEAVE:
            self._leave()
        self._begun = time.monotonic()

    def close(self) -> None:
        """Watch no more, and restore the handlers of signals that were there before. A collective call.

        A signal after which nothing was saved is raised again, for these.
        """
        self._stop()
        self._signals.restore()
        first = self._take_unheeded()
        if first is not None and first[0] != _WATCHER:
            signal.raise_signal(first[0])

    def _take_unheeded(self) -> tuple[int, float] | None:
        """Return by what this rank was told to end, and when, if nothing was saved since; once."""
        first, self._signals.first = self._signals.first, None
        return None if self._has_acted else first

    def _stop(self) -> None:
        """Exchange nothing any more. A collective call."""
        global _active
        if self is _active:
            _active = None
            self._votes.close()

    def _vote(self, now: float) -> int:
        """Return what this rank votes for."""
        grace, ask, level, cause = self._config.grace_period, self._config.termination_watcher_fn, _GO_ON, 0
        if self._signals.first is None and ask is not None and ask():
            self._signals.first = _WATCHER, now
        if self._signals.first is not None:
            cause, when = self._signals.first
            level = _SAVE if grace and not self._is_nearly(when + grace, grace, now) else _LEAVE
        if level != _LEAVE and self._is_nearly(*self._limit, now):
            level, cause = _LEAVE, _TIME_LIMIT
        return level << _LEVEL_BITS | cause << _CAUSE_BITS | self._rank if level else 0

    def _is_nearly(self, end: float, seconds: float, now: float) -> bool:
        """Return whether this is the last moment to save and leave before `end`, where there were so many seconds in all."""
        save_seconds = max(self._saved_seconds, self._checkpoint._writer.longest_seconds)
        reserve = min(_RESERVE_SECONDS, _RESERVE_PART * seconds)
        return now + _STEPS_AHEAD * self._step_seconds + _SAVES_AHEAD * save_seconds + reserve > end

    def _save(self, args: Any, kwargs: Any) -> None:
        began = time.monotonic()
        try:
            self._checkpoint._writer.finish()
        except CheckpointError as error:  # of an earlier save, on all ranks
            if self._rank == 0:
                logger.warning(str(error))
        if self._config.save_fn is None:
            self._manager.save(self._total_run_calls, wait=True)
        else:
            self._config.save_fn(*args, **kwargs)
        self._saved_seconds = max(self._saved_seconds, time.monotonic() - began)

    def _tell(self, agreed: int) -> None:
        """Say on one rank why the job saves or leaves."""
        if self._rank:
            return
        cause, rank = agreed >> _CAUSE_BITS & 0xFF, agreed & 0xFFFFFFFF
        names = {_TIME_LIMIT: "the time limit is near", _WATCHER: f"rank {rank} was told by its termination_watcher_fn"}
        why = names.get(cause) or f"rank {rank} has received {signal.Signals(cause).name}"
        count = os.environ.get("SLURM_RESTART_COUNT")
        restarts = f"; SLURM_RESTART_COUNT={count}" if count else ""
        verb = "stops after" if agreed >> _LEVEL_BITS == _LEAVE else "goes on, for its grace period, after"
        logger.warning(f"the job {verb} step {self._total_run_calls}, which is saved: {why}{restarts}")

    def _leave(self) -> None:
        """End the program, as its configuration says."""
        self._signals.ignore()
        self._stop()
        try:
            sys.exit(RESTART_EXIT_CODE) if self._config.exit_fn is None else self._config.exit_fn()
        except SystemExit as leaving:
            if self._votes.are_of_whole_job:
                abort.leave_together(leaving.code)
            raise
        self._signals.restore()


class _Votes:
    """Numbers of ranks, of which all learn the highest a step later. Making one is a collective call."""

    def __init__(self, communicator: BaseCommunicator) -> None:
        view = detect()
        self.are_of_whole_job = view is None or not view.has_peers
        self._comm: MPI.Intracomm | None = None
        self._request: MPI.Request | None = None
        self._mine, self._highest = np.zeros(1, np.int64), np.zeros(1, np.int64)
        if isinstance(communicator, Communicator) and communicator.size > 1:
            self._maximum, self._guard, self._members = MPI.MAX, communicator._guard, communicator.hierarchy.members
            self._owner = communicator
            self._comm = communicator.hierarchy.world_group.comm.Dup()
            self._among = f"votes, communicator {communicator.hierarchy.number}, collective {communicator.num_collectives}"
            self.are_of_whole_job = communicator.size == MPI.COMM_WORLD.Get_size()

    def exchange(self, number: int) -> int:
        """Return the highest number of the call before, 0 at first, and start to find that of this one; at once if alone."""
        if self._comm is None:
            return number
        highest = self._complete("a step")
        self._mine[0] = number
        self._request = self._comm.Iallreduce(self._mine, self._highest, self._maximum)
        return highest

    def close(self) -> None:
        """Complete what was started, free the communicator; both are kept where ranks are out of step. A collective call."""
        if self._comm is None:
            return
        if self._request is not None and not self._owner.is_closed and self._guard.is_broken():
            keep_alive_for_peers(self)
        else:
            self._complete("its end")
            self._comm.Free()
        self._comm = None

    def _complete(self, what: str) -> int:
        """Wait for what was started, as long as all can still come to it, and return it; 0 if nothing was."""
        what = f"PreemptionCheckpointHandler: {what}"
        with watched(what, self._members, self._among):
            if self._request is None:
                return 0
            if not self._request.Test():
                watching, seconds = watcher.watcher(), self._guard.deadlines.default_seconds
                check = None if watching is None else watching.raise_verdict
                drive(until(self._request.Test), lambda: what, seconds, check=check)
            self._request = None
            return int(self._highest[0])


_active: PreemptionCheckpointHandler | None = None


def _close_active() -> None:
    """Complete what was started, at the end of a program that was not told to end; a signal comes too late from now on."""
    if _active is not None and abort.ending_code() == 0:
        _active._signals.ignore()
        try:
            _active._stop()
        except Exception as error:
            abort.end(error)


ending.at(ending.Stage.COMPARE, _close_active)
