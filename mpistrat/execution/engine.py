"""Engine: the one background thread of a process, which runs asynchronous operations while the program computes.

Invariant: jobs run one at a time, in the order in which the program submits them; for collective jobs it must be the same on
all ranks. Program threads submit and wait; only the engine runs jobs, but for one that a thread which asks for its result can
complete at once. From the submission of a job until it has ended, no other call uses its communicator: a call that needs it
waits for the job first (`execution.guard`). While a job runs, only its own lock is held, and it is marked as ended last, so
that a thread that sees the mark sees everything the job wrote.

A job's failure is raised by `Job.result`. If nobody asks for the result, the next collective call raises it, or the end of the
program: `raise_unclaimed_failure`.

An engine that polls would take the core and the GIL from the program. So while it waits it sleeps, longer each time; only while
a program thread waits for it does it poll without sleeping.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, cast

from mpistrat import ending
from mpistrat.errors import UnavailableError
from mpistrat.launch import abort
from mpistrat.watch.recorder import recorder

T = TypeVar("T")
U = TypeVar("U")

# the increment of the sleeps and the longest one: sleeping delays messages, but leaves the core to the program
_SLEEP_STEP_SECONDS, _MAX_SLEEP_SECONDS = 2e-5, 5e-4
# how often a thread that waits for a job checks that the engine is alive
_ALIVE_CHECK_SECONDS = 1.0
# how often to try to complete a job before the core is yielded each time, and before it is submitted
_POLLS, _LOOKS = 40, 104
# how long the engine may take to leave an abandoned job; it cannot leave a blocking call of MPI
_LEAVE_SECONDS = 1.0


class Job:
    """A function to be run by the engine.

    One that another function can `complete`, which returns a result, or None, and never waits, is not submitted at once: to
    wake the engine takes longer. An interrupt in there leaves it to be completed.
    """

    def __init__(
        self,
        carry_out: Callable[[], object],
        what: Callable[[], str],
        owner: object = None,
        is_on_gpu: bool = False,
        complete: Callable[[], object] | None = None,
    ) -> None:
        self._carry_out: Callable[[], object] | None = carry_out
        self._complete, self._looks = complete, 0
        self._running: Any = threading.RLock()
        self.owner, self.is_on_gpu = owner, is_on_gpu
        self._what = what
        self._has_ended, self._under_way = False, threading.Lock()  # the lock is for those who wait: cheaper than an Event
        self._under_way.acquire()
        self._result: object = None
        self._callbacks: deque[Callable[[], object]] = deque()
        self.failure: BaseException | None = None
        self.is_claimed = False

    def has_ended(self) -> bool:
        """Return whether it has ended, successfully or not."""
        if self._complete is not None:
            with self._running:  # two threads may be here
                self._looks += 1
                result = None if self._complete is None else self._complete()
                if result is not None:
                    self._end(result)
                    self._wake()
                elif self._looks > _LOOKS:  # the engine waits, and finds out if that is in vain
                    self.submit()
        return self._has_ended

    def runs_here(self) -> bool:
        """Return whether this thread is completing it, or was, and a signal handler asks."""
        return bool(self._running._is_owned())  # as `threading.Condition` asks its lock

    def submit(self) -> None:
        """Have the engine run it, unless that has been done, or it has ended."""
        if self._complete is not None:
            # at the end of the program the engine has left; an interrupt before the last line has it submitted twice
            (self.run if _engine.has_left else partial(submit, self))()
            self._complete = None

    def run(self) -> None:
        """Run it on this thread, unless it has ended, and its callbacks."""
        with self._running:
            if self._carry_out is not None:
                result = None
                try:
                    result = self._carry_out()
                except BaseException as failure:  # raised by `result`
                    self.failure = failure
                    _engine.note_failure(self)
                self._end(result)
        try:
            self._call_back()  # before others wake up, and need the core and the GIL
        except BaseException as failure:  # of a callback: the thread goes on
            self.failure = self.failure or failure
            _engine.note_failure(self)
        self._wake()

    def _end(self, result: object) -> None:
        self._result, self._has_ended = result, True
        self._carry_out = self._complete = None  # frees the arrays it worked on

    def _wake(self) -> None:
        if self._under_way.locked():
            self._under_way.release()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Have `callback` called once when it has ended, on whatever thread learns of that."""
        self._callbacks.append(callback)
        self.submit()
        if self._has_ended:
            self._call_back()

    def _call_back(self) -> None:
        with suppress(IndexError):  # two threads may be here, and each takes another
            while True:
                self._callbacks.popleft()()

    def join(self) -> None:
        """Wait until it has ended; raise if it will not: the engine's thread is gone, or is this one."""
        while self._complete is not None:
            self.has_ended()
            if self._looks > _POLLS:
                os.sched_yield()
        if self._has_ended:
            return
        if _engine.is_this_thread():
            raise UnavailableError(f"a callback of what was started cannot wait for {self._what()}, which is behind it")
        with _awaited():
            # it may have ended, and one of its callbacks wait for something of this thread
            while not self._has_ended:
                if self._under_way.acquire(timeout=_ALIVE_CHECK_SECONDS):
                    self._under_way.release()
                elif not (_engine.is_alive() or self._has_ended):
                    raise UnavailableError(
                        f"{self._what()} will not end: the thread that carries out what was started is gone. Start and wait "
                        "for it in the process that made the strategy, and before that ends."
                    )

    def result(self) -> object:
        """Return the result of a job that has ended, or raise its failure."""
        if self.failure is not None:
            self.is_claimed = True
            raise self.failure
        return self._result


class End(Protocol):
    """The end of what a job has enqueued on a GPU."""

    def done(self) -> bool:
        """Return whether the GPU has come to it."""

    def wait(self, host: bool) -> None:
        """Let the host wait for it, or only the current stream."""


class Work(Generic[T]):
    """The handle of an asynchronous operation, which completes even if the handle is dropped.

    Parameters
    ----------
    job : Job
        The job of the engine.
    finish : callable, optional
        Turns the job's result into that of the handle; by default they are the same.
    end : End, optional
        The end on the GPU of a job that ends when its work has been enqueued.
    """

    def __init__(self, job: Job, finish: Callable[[Any], T] | None = None, end: End | None = None) -> None:
        self._job, self._end = job, end
        self._finish = finish or (lambda result: cast("T", result))
        self._finished: list[T] = []

    @classmethod
    def ended(cls, result: T, end: End | None = None) -> Work[T]:
        """Return a handle that has completed with this result, or will where a GPU comes to its `end`."""
        job = Job(lambda: result, lambda: "")
        job.run()
        return cls(job, end=end)

    def done(self) -> bool:
        """Return whether the operation has completed.

        If it has failed, every call of `done` and `wait` raises its error.
        """
        if not self._job.has_ended():
            time.sleep(0)  # a polling loop would keep the GIL from the engine
            return False
        self._job.result()
        return self._end is None or self._end.done()

    def wait(self, *, host: bool = False) -> T:
        """Wait until the operation has completed and return its result.

        On a GPU where NCCL joins all ranks, the current stream waits, and the program goes on: work enqueued there afterwards
        sees the result. With `host` the program waits too.

        Raises
        ------
        DeadlineExceededError
            If its deadline, which counts from its beginning, has passed.
        UnavailableError
            If an operation started earlier has failed, so that no further collective can be made.
        AgreementError
            On every replica, if replicas started different operations.
        """
        self._job.join()
        result = self._job.result()
        if self._end is not None:
            self._end.wait(host)
        if not self._finished:
            self._finished.append(self._finish(result))
        return self._finished[0]

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Have `callback` called once when the operation has ended, well or not; at once if it has. It must not block.

        What has been enqueued on a GPU has ended in this sense.
        """
        self._job.add_done_callback(callback)

    def then(self, finish: Callable[[T], U]) -> Work[U]:
        """Return a handle on the same operation with the result ``finish(result)``; use it in place of this one."""
        before = self._finish
        return Work(self._job, lambda result: finish(before(result)), self._end)


def submit(job: Job) -> None:
    """Queue a job for the engine; the first one starts the engine's thread."""
    _engine.submit(job)


def wait_for_gpu(owner: object) -> None:
    """Wait for the jobs that other owners have submitted for this process's GPU.

    Kernels of two NCCL communicators must start in the same order on all ranks, or they deadlock. Jobs start in program order,
    and so does a call that waits here first.
    """
    job = _engine.last_on_gpu()
    if job is not None and job.owner is not owner:
        job.join()


def raise_unclaimed_failure(owner: object) -> None:
    """Raise the first failure of an owner's jobs that has not been raised in the program yet.

    It is raised only once, and failures of the owner's later jobs, which may be consequences, are dropped.
    """
    failure = _engine.take_unclaimed_failure(owner)
    if failure is not None:
        raise failure


def has_unclaimed_failure(owner: object) -> bool:
    """Return whether `raise_unclaimed_failure` would raise."""
    return bool(_engine.failed and _engine.unclaimed(owner))


def back_off(waits: int) -> None:
    """Leave the core to the program for a while, longer with each wait in a row."""
    if _engine.is_leaving:
        raise UnavailableError("the program ended by an exception before this had ended")
    if _engine.num_waiting:
        os.sched_yield()
    else:
        time.sleep(min(waits * _SLEEP_STEP_SECONDS, _MAX_SLEEP_SECONDS))


class _Engine:
    """The queue and the thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.num_waiting = 0
        self.is_leaving = self.has_left = False
        self.failed: deque[Job] = deque()
        # weak: the engine holds a job until it has ended, and a result must not outlive its handle
        self.last_on_gpu: Callable[[], Job | None] = lambda: None

    def submit(self, job: Job) -> None:
        if job.is_on_gpu:
            self.last_on_gpu = weakref.ref(job)
        with self._starting:
            if self._thread is None:
                # a daemon, because Python joins all other threads before it calls exit handlers
                self._thread = threading.Thread(target=self._work, name="mpistrat engine", daemon=True)
                self._thread.start()
                ending.at(ending.Stage.FINISH, self._leave)
        self._jobs.put(job)

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def note_failure(self, job: Job) -> None:
        while self.failed and self.failed[0].is_claimed:
            self.failed.popleft()
        self.failed.append(job)

    def unclaimed(self, *owners: object) -> list[Job]:
        return [job for job in tuple(self.failed) if not job.is_claimed and (not owners or job.owner in owners)]

    def take_unclaimed_failure(self, *owners: object) -> BaseException | None:
        """Return the first unclaimed failure of these owners, or of any owner; mark all of them as claimed."""
        unclaimed = self.unclaimed(*owners)
        for job in unclaimed:
            job.is_claimed = True
        return unclaimed[0].failure if unclaimed else None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # do not keep its result alive while waiting for the next job

    def _leave(self) -> None:
        """Stop before MPI is finalized: after the last job, or at once if the program ended by an exception or exit code."""
        assert self._thread is not None, "registered when the thread was started"
        self.is_leaving = abort.ending_code() != 0
        self._jobs.put(None)
        with _awaited():
            self._thread.join(_LEAVE_SECONDS if self.is_leaving else None)
        self.has_left = True
        failure = self.take_unclaimed_failure()
        if failure is not None and not self.is_leaving:
            abort.end(failure)


@contextmanager
def _awaited() -> Iterator[None]:
    """Let the engine poll without sleeping, and the watcher know if the program does not go on meanwhile."""
    is_main = threading.current_thread() is threading.main_thread()
    _engine.num_waiting += 1
    try:
        if is_main:
            recorder().note(awaited=True)
        yield
    finally:
        _engine.num_waiting -= 1
        if is_main:
            recorder().note(awaited=False)


_engine = _Engine()


def _forget() -> None:
    """Start a forked child, which does not have the thread, with a new engine."""
    global _engine
    _engine = _Engine()


os.register_at_fork(after_in_child=_forget)
