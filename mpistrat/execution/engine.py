"""Engine: the one thread of a process that carries out what programs have started, while they compute.

File law: jobs are carried out one at a time, in the order of their submission, which is the program's; where jobs are
collective, it must be the same on all ranks. Program threads submit and wait; only the engine runs jobs. From the submission
of a job until the end of the last one of its communicators no other thread uses them: who has them waits for that job
(`communicator.guard`). Nothing is locked while a job runs, and a job's end is told last, so that who sees it sees all that the
job wrote.

A job's failure belongs to who waits for it. One that nobody has waited for is raised by the next collective call, or when the
program ends: `raise_unclaimed_failure`.

The program needs the core and Python's lock that the engine takes. So an engine that waits sleeps, longer each time, and only
as long as a program thread waits for it does it look without a pause.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from mpistrat.errors import UnavailableError
from mpistrat.launch import abort, exit_code
from mpistrat.transports.steps import give_way

__all__ = ["Job", "raise_unclaimed_failure", "rest", "submit", "wait_for_gpu"]

# how much longer each sleep is than the one before, and the longest: it delays a message, but costs little of a core
_LONGER_SECONDS, _LONGEST_SECONDS = 2e-5, 5e-4
# how often who waits for a job looks whether there still is a thread to do it
_LOOK_SECONDS = 1.0
# for the engine to leave a job that is given up: one in a call of MPI that blocks cannot
_LEAVE_SECONDS = 1.0


class Job:
    """Something to be carried out by the engine.

    Parameters
    ----------
    carry_out : callable
        Does it, and returns the result.
    what : callable
        Says, for an error, what it is.
    owner : object, optional
        Who raises its failure where nobody waits for it.
    is_on_gpu : bool
        Whether it may enqueue work on this process's GPU.

    Attributes
    ----------
    owner, is_on_gpu : object, bool
        As given.
    failure : BaseException or None
        What `carry_out` raised.
    is_claimed : bool
        Whether the program has been told of the failure.
    """

    def __init__(
        self, carry_out: Callable[[], object], what: Callable[[], str], owner: object = None, is_on_gpu: bool = False
    ) -> None:
        self._carry_out: Callable[[], object] | None = carry_out
        self.owner, self.is_on_gpu = owner, is_on_gpu
        self._what = what
        self._ended = threading.Event()
        self._result: object = None
        self.failure: BaseException | None = None
        self.is_claimed = False

    def has_ended(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._ended.is_set()

    def run(self) -> None:
        """Carry it out, on this thread."""
        assert self._carry_out is not None, "a job runs once"
        try:
            self._result = self._carry_out()
        except BaseException as failure:  # it is raised where the program waits
            self.failure = failure
            _engine.note_failure(self)
        self._carry_out = None  # and with it what it worked on
        self._ended.set()

    def join(self) -> None:
        """Wait until it has ended.

        Raises
        ------
        UnavailableError
            If there is no engine any more that could carry it out: the process was forked, or ends.
        """
        while not self._ended.is_set():
            _engine.num_waiting += 1
            try:
                self._ended.wait(_LOOK_SECONDS)
            finally:
                _engine.num_waiting -= 1
            if not _engine.is_alive() and not self._ended.is_set():
                raise UnavailableError(
                    f"{self._what()} will not end: the thread that carries out what was started is gone. Start and wait for it "
                    "in the process that made the strategy, and before that ends."
                )

    def result(self) -> object:
        """Return the result of a job that has ended, or raise what made it fail."""
        if self.failure is not None:
            self.is_claimed = True
            raise self.failure
        return self._result


def submit(job: Job) -> None:
    """Have a job carried out when all that were submitted before have ended; the first one starts the engine."""
    _engine.submit(job)


def wait_for_gpu(owner: object) -> None:
    """Wait until what other owners have submitted for this process's GPU has ended.

    Kernels of two NCCL communicators must begin in one order on all ranks, or they wait for each other for ever. Jobs begin in
    the order of the program; so does a call of the program that waits here first.
    """
    job = _engine.last_on_gpu()
    if job is not None and job.owner is not owner:
        job.join()


def raise_unclaimed_failure(owner: object) -> None:
    """Raise the first failure of an owner's jobs that have ended, if the program has not been told of it.

    It is not raised here again, and neither are those of its later jobs, which may be consequences.

    Parameters
    ----------
    owner : object
        What the jobs were made with.
    """
    failure = _engine.take_unclaimed_failure(owner)
    if failure is not None:
        raise failure


def rest(waits: int) -> None:
    """Let the program have the core for a while; `waits` says how often in a row there was nothing to do."""
    if _engine.is_leaving:
        raise UnavailableError("the program ended by an exception before this had ended")
    if _engine.num_waiting:
        give_way()
    else:
        time.sleep(min(waits * _LONGER_SECONDS, _LONGEST_SECONDS))


class _Engine:
    """Its queue and its thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.num_waiting = 0
        self.is_leaving = False
        self._failed: deque[Job] = deque()
        # weak: the engine holds a job until it has ended, and results are not to live longer than who waits for them
        self.last_on_gpu: Callable[[], Job | None] = _no_job

    def submit(self, job: Job) -> None:
        if job.is_on_gpu:
            self.last_on_gpu = weakref.ref(job)
        with self._starting:
            if self._thread is None:
                # a daemon: Python waits for other threads before it calls what was registered to be called at its end
                self._thread = threading.Thread(target=self._work, name="mpistrat engine", daemon=True)
                self._thread.start()
                atexit.register(self._leave)
        self._jobs.put(job)

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def note_failure(self, job: Job) -> None:
        while self._failed and self._failed[0].is_claimed:
            self._failed.popleft()
        self._failed.append(job)

    def take_unclaimed_failure(self, *owners: object) -> BaseException | None:
        """Return the first of these owners, or of all where none is given."""
        unclaimed = [job for job in tuple(self._failed) if not job.is_claimed and (not owners or job.owner in owners)]
        for job in unclaimed:
            job.is_claimed = True
        return unclaimed[0].failure if unclaimed else None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # nothing is kept while there is nothing to do

    def _leave(self) -> None:
        """End before MPI does: after the last job, or at once where the program ended by an exception or with a code."""
        assert self._thread is not None, "nothing is registered before the thread is"
        self.is_leaving = exit_code.ending_code() != 0
        self._jobs.put(None)
        self._thread.join(_LEAVE_SECONDS if self.is_leaving else None)
        failure = self.take_unclaimed_failure()
        if failure is not None and not self.is_leaving:
            abort.end(failure)


def _no_job() -> None:
    """Return what a reference to a job that is gone does."""


_engine = _Engine()


def _forget() -> None:
    """Have a forked child, in which there is no such thread, begin with nothing."""
    global _engine
    _engine = _Engine()


os.register_at_fork(after_in_child=_forget)
