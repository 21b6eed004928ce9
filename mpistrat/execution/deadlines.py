"""Deadlines: runs the steps of a communicator's calls within their time, and finds which ranks are missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from mpistrat.errors import DeadlineExceededError
from mpistrat.execution.comparison import Call
from mpistrat.execution.engine import back_off
from mpistrat.groups.deadline_barrier import LONGEST_GRACE_SECONDS, DeadlineBarrier
from mpistrat.groups.group import PROBES
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.lazy import MPI
from mpistrat.reduction import QUIET
from mpistrat.steps import Steps, drive, ends_soon
from mpistrat.transports.window import LEFT, NodeWindow
from mpistrat.watch import watcher
from mpistrat.watch.states import entered

_ANSWER_SECONDS = 1.0  # for ranks to report their call after a deadline has passed


class Deadlines:
    """The deadlines of calls: `default_seconds`, or what a call has of its own; 0 means none.

    `current` returns the number of the program's last call, and its text: those of the call that is under way, unless that was
    started. `check_gpu` raises if what was enqueued on the GPU has been aborted.
    """

    def __init__(
        self, hierarchy: Hierarchy, window: NodeWindow | None, seconds: float, current: Callable[[], tuple[int, str]]
    ) -> None:
        world = hierarchy.world
        nodes = [world.place(rank).node.name for rank in range(world.size)]
        self.barrier = DeadlineBarrier(hierarchy.world_group, nodes)
        self.default_seconds = self._seconds = seconds
        self.check_gpu: Callable[[], None] = lambda: None
        self._node_ranks = hierarchy.place.node.ranks
        self._rank, self._job_ranks, self._communicator = hierarchy.job_rank, hierarchy.job_ranks, hierarchy.number
        self._present, self._window, self._one_node = hierarchy.call, window, world.num_nodes == 1
        self._current, self._number, self._watcher = current, 0, watcher.start()
        self._limits: watcher.Limits = {} if self._watcher is None else self._watcher.limits
        self._present.drive, self._present.must_poll = self.drive, bool(seconds)

    def run(self, call: Call, steps: Steps) -> None:
        """Run the steps of a call within the rest of its time."""
        self._number = call.number
        self.drive(steps, call)

    def drive(self, steps: Steps, call: Call | None = None) -> None:
        """Run steps of a call; by default of the current one, on a fast path, with the default deadline or `begin_limit`'s."""
        what, seconds, rest, back = self._describe, self._seconds, self._seconds, None
        if call is not None:
            what, seconds, rest, back = (
                partial(str, call),
                call.seconds,
                call.rest_seconds,
                back_off if call.is_started else None,
            )
        self._present.ends = time.monotonic() + rest if rest else 0.0
        # NumPy raises nothing for their arithmetic: see `quiet`
        QUIET.copy().run(drive, steps, what, rest, lambda: self._overdue(what(), seconds), back, self._check_progress)
        # a rank that has given up may have changed its arrays before this one read them
        if rest:
            self.barrier.raise_if_given_up(what, probes=PROBES)
        if self._window is not None and self._window.own[LEFT]:
            raise self._window.has_no_result(what())

    def drive_short(self, steps: Steps) -> None:
        """Do the same with less Python, for steps without arithmetic that most often end at once."""
        if self._seconds or not ends_soon(steps):
            self.drive(steps)

    def wait(self, what: str, steps: Steps) -> None:
        """Run steps that have no deadline here: what else watches them raises."""
        drive(steps, lambda: what, check=self._raise_verdict)

    def arrive(self, call: Call, enter: Callable[[], MPI.Request]) -> None:
        """Wait until all ranks have started what `enter` starts; the barrier watches the deadline and the messages of peers."""
        what, self._number = partial(str, call), call.number
        steps = self.barrier.steps(enter, what, call.seconds, self._absent)
        drive(steps, what, back_off=back_off if call.is_started else None, check=self._raise_verdict)

    def begin(self, call: Call) -> None:
        """Make the deadline of a call that of the steps to come; transports poll, so that they can be given up."""
        self._present.must_poll = bool(call.seconds) or call.is_started

    def watch(self, call: Call) -> None:
        """Have the watcher end the job if this rank is blocked in MPI when the deadline of a call has passed."""
        self._limits[self] = (
            call.ends,
            lambda: DeadlineExceededError(
                f"rank {self._rank}: {call} did not end within {call.seconds:g} s: this rank waits in a call of MPI that "
                "does not return, for ranks that have stopped or ended"
            ),
        )

    def begin_limit(self, seconds: float) -> None:
        """Give a call on a fast path a deadline of its own, or none, which is 0; raise if other ranks have given it up."""
        self._seconds, self._present.must_poll = seconds, bool(seconds)
        if seconds:
            self.barrier.raise_if_given_up(self._describe)

    def end(self) -> None:
        """Forget the deadline of a call: the default applies again."""
        self._seconds, self._present.must_poll, self._present.ends = self.default_seconds, bool(self.default_seconds), 0.0
        self._number = 0
        if self._limits:
            self._limits.pop(self, None)

    def _check_progress(self) -> None:
        """Raise if the current call is known not to end."""
        self._raise_verdict()
        # a rank whose own deadline is about to pass names the missing ranks itself
        is_last_moment = self._present.ends and self._present.ends - time.monotonic() < LONGEST_GRACE_SECONDS
        if not is_last_moment and self.barrier.is_given_up():
            raise self.barrier.given_up(self._describe(), self._missing())

    def _raise_verdict(self) -> None:
        if self._watcher is not None:
            self._watcher.raise_verdict()
        self.check_gpu()

    def _describe(self) -> str:
        number, text = self._current()
        return f"collective {number}, {text}"

    def _overdue(self, what: str, seconds: float) -> DeadlineExceededError:
        """Notify all ranks that this one gives up the call, and return the error that names the ranks that do not answer."""
        self._present.has_failed = True
        return self.barrier.overdue(what, seconds, self._missing())

    def _missing(self) -> list[int]:
        """Return the ranks that have not arrived, as far as this node's memory and the records of all ranks show."""
        late = {self._node_ranks[rank] for rank in (() if self._window is None else self._window.missing())}
        if not late and self._one_node:
            return []
        came = self._came()  # those that are late in the node's memory may wait in the call for others
        return [rank for rank, is_there in came.items() if is_there is False or (rank in late and is_there is None)]

    def _absent(self) -> set[int]:
        """Return the ranks that are known not to have entered the current call."""
        return {rank for rank, is_there in self._came().items() if is_there is False}

    def _came(self) -> dict[int, bool | None]:
        """Return for each rank whether it has entered the current call; None if that is not known."""
        if self._watcher is None:
            return dict.fromkeys(range(len(self._job_ranks)))
        states = self._watcher.compare(_ANSWER_SECONDS, self._job_ranks)
        came = entered(states, (self._communicator, self._number or self._current()[0]))
        return {rank: None if state.state == "unknown" else state.rank in came for rank, state in enumerate(states)}
