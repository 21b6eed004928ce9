"""Gate: what every collective call passes: none has failed before, all ranks come in time, and make the same call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.errors import DeadlineExceededError, UnavailableError
from mpistrat.execution.engine import Job, rest, submit
from mpistrat.execution.work import Work
from mpistrat.groups.agreement import Agreement
from mpistrat.groups.arrival import Arrival
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.transports.base import Steps, drive, leave_to_peers

__all__ = ["Call", "Gate"]

T = TypeVar("T")

# what a call that has met all ranks at the last moment may still take
_LEAST_SECONDS = 0.2


@dataclass
class Call:
    """A collective call: what errors call it, and its deadline.

    Attributes
    ----------
    number : int
        Its sequence number.
    verb : str
        What it does.
    describe : callable
        Returns it with its arguments.
    options : CommunicationOptions
        All that hold for it.
    is_started : bool
        Whether the engine carries it out while the program goes on.
    ends : float
        When its time is up, on the clock of `time.monotonic`; 0 means never, or that its turn has not come.
    """

    number: int
    verb: str
    describe: Callable[[], str]
    options: CommunicationOptions
    is_started: bool = False
    ends: float = 0.0

    def __str__(self) -> str:
        return f"collective {self.number}, {self.describe()}"

    @property
    def seconds(self) -> float:
        """The deadline in seconds from the beginning; 0 means none."""
        return self.options.timeout_seconds or 0.0

    def begin(self) -> None:
        """Let its time run: its turn has come."""
        self.ends = time.monotonic() + self.seconds if self.seconds else 0.0

    @property
    def rest_seconds(self) -> float:
        """What is left of it; 0 means that there is no deadline."""
        return max(self.ends - time.monotonic(), _LEAST_SECONDS) if self.ends else 0.0


class Gate:
    """Lets collective calls through, and no more of them once one has failed.

    Parameters
    ----------
    hierarchy : Hierarchy
        Whose ranks call.
    agreement : Agreement
        Compares the calls of all ranks.
    memory : object
        What calls work on; kept for ever once one has failed.

    Attributes
    ----------
    refusal : str
        Why a collective cannot begin at once, or an empty text.
    """

    def __init__(self, hierarchy: Hierarchy, agreement: Agreement, memory: object) -> None:
        world = hierarchy.world
        nodes = [world.nodes[world.place(rank).node_index].name for rank in range(world.size)]
        self._arrival = Arrival(hierarchy.world_group, nodes)
        self._agreement, self._comm, self._memory, self._rank = agreement, hierarchy.world_group.comm, memory, hierarchy.rank
        self.refusal = ""
        self._last: Job | None = None
        self._failure = ""
        self._cause: BaseException | None = None

    def is_broken(self) -> bool:
        """Return whether a collective has failed, here or on a rank that has told so."""
        return bool(self._failure) or self._arrival.is_given_up()

    def require_open(self) -> None:
        """Wait for what was started before, and check that a collective can be made.

        Raises
        ------
        UnavailableError
            If one is under way on another thread, or has failed.
        """
        if self._last is not None:
            self.settle()
        self.require_sound()
        if self.refusal:
            raise self._refused(self.refusal)

    def require_sound(self) -> None:
        """Check that no collective has failed.

        Raises
        ------
        UnavailableError
            If one has.
        """
        if self._failure:
            raise self._refused(self._failure) from self._cause

    def require_startable(self) -> None:
        """Check that a collective can be started: after others that were, but not beside one that another thread is in.

        Raises
        ------
        UnavailableError
            If one is under way there, or has failed.
        """
        self.require_sound()
        if self.refusal and self._last is None:
            raise self._refused(self.refusal)

    def settle(self) -> None:
        """Wait until all that was started has ended, well or not."""
        if self._last is not None:
            self._last.join()
            self._last, self.refusal = None, self._failure

    def start(self, call: Call, carry_out: Callable[[], T]) -> Work[T]:
        """Have the engine carry out a call, after all that was started before; until it has ended the engine has the ranks."""
        job = Job(carry_out, lambda: str(call))
        self._last, self.refusal = job, _under_way(call.verb)
        submit(job)
        return Work(job)

    def arrive(self, call: Call) -> None:
        """Wait until all ranks have come. A collective call.

        Raises
        ------
        DeadlineExceededError
            If the call has a deadline, and they do not come in time.
        """
        self._drive(call, self._arrival.steps(self._comm.Ibarrier, lambda: str(call), call.seconds))

    def agree(self, call: Call, error: Exception | None = None) -> None:
        """Wait until all ranks have come, and check that they make the same call. A collective call.

        Raises
        ------
        DeadlineExceededError
            If they do not come in time.
        AgreementError
            On every rank, if the calls differ; on one that passes an `error`, that error.
        """
        self._agreement.check(
            call.describe(),
            error,
            lambda enter: self._drive(call, self._arrival.steps(enter, lambda: str(call), call.seconds)),
        )

    def run(self, call: Call, steps: Steps) -> None:
        """Go through the steps of a call that has been let in, in what is left of its time.

        Meanwhile, and for ever if they fail, no other collective can be made.

        Raises
        ------
        DeadlineExceededError
            If they do not end in time.
        """
        if call.is_started:
            self._drive(call, steps, call.rest_seconds)
            return
        self.refusal = _under_way(call.verb)
        self._drive(call, steps, call.rest_seconds)
        self.refusal = ""

    def run_at_once(self, verb: str, act: Callable[..., None], *arguments: object) -> None:
        """Do what has no deadline and was let in without a call of its own; what it raises is left to `fail`."""
        self.refusal = _under_way(verb)
        act(*arguments)
        self.refusal = ""

    def overdue(self, call: Call) -> DeadlineExceededError:
        """Tell all ranks that the call is given up here, and return the error that says who does not answer."""
        return self._arrival.overdue(str(call), call.seconds)

    def give_up(self) -> None:
        """Tell all ranks that this one comes to no collective any more."""
        self._arrival.give_up()

    @property
    def who_gave_up(self) -> str:
        """The ranks that have told so, by name."""
        return self._arrival.who_gave_up

    def fail(self, verb: str, error: BaseException) -> None:
        """Let no other collective through: one has failed here, and ranks may be out of step."""
        name = type(error).__name__
        self._cause = error
        self._failure = f"an earlier {verb} did not end ({name}), and ranks may be out of step; make a new strategy"
        self.refusal = self._failure
        leave_to_peers(self._memory)

    def _drive(self, call: Call, steps: Steps, timeout_seconds: float = 0.0) -> None:
        """Go through steps; those that see to their deadline themselves are given none."""
        try:
            drive(steps, call.describe, timeout_seconds, lambda: self.overdue(call), rest if call.is_started else None)
        except BaseException as error:
            self.fail(call.verb, error)
            raise

    def _refused(self, why: str) -> UnavailableError:
        return UnavailableError(f"rank {self._rank}: no further collective can be made: {why}")


@cache
def _under_way(verb: str) -> str:
    return f"an earlier {verb} is still under way: wait for it first"
