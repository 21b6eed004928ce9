"""Agreement: all ranks make the same call, or all raise; what one or each rank finds, or all raise; and waits for others.

A call is described by a text. Ranks compare a 64-bit hash of it, the digest; texts are exchanged only if digests differ.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from mpistrat.errors import AgreementError, MpistratError
from mpistrat.groups.group import Group, keep_alive_for_peers
from mpistrat.lazy import MPI
from mpistrat.reduction import Array
from mpistrat.steps import Steps, until
from mpistrat.text import ranks_by
from mpistrat.watch.recorder import hash_of
from mpistrat.watch.verdict import mismatch_text
from mpistrat.watch.watcher import watcher

Completion = Callable[[Callable[[], "MPI.Request"]], None]
"""Calls the function that it is given, which starts an exchange, and returns when that has completed."""

COMPARED = 1
"""The bit of a digest that is set if its rank compares calls before all else, and exchanges texts if they differ."""

ROW = 3
_DIGEST_MASK = (1 << 63) - 2
_YIELD_SECONDS, _POLL_SECONDS = 0.02, 0.0005
_DIGESTS_KEPT = 4096
_NOTES_SHOWN = 3

_notes_of: dict[int, tuple[str, ...]] = {}

T = TypeVar("T")


def bcast_or_raise(comm: MPI.Intracomm, find: Callable[[], T]) -> T:
    """Return what `find` returns on the first rank, or raise on all ranks what it raises there. A collective call."""
    answer, cause = _attempt(find, 0) if comm.Get_rank() == 0 else (None, None)
    found: T = _found(comm.bcast(answer), cause)
    return found


def gather_or_raise(group: Group, find: Callable[[], T]) -> list[T]:
    """Return what `find` returns on each rank, or raise on all ranks what it raises on the first that fails. A collective call.

    It must not wait for other ranks, or not for ever.
    """
    rank = group.ranks[group.rank]
    answer, cause = _attempt(find, rank)
    if isinstance(answer, MpistratError) and cause is None:
        answer.args = (f"rank {rank}: {answer}",)
    return [_found(each, cause) for each in group.comm.allgather(answer)]


def _attempt(find: Callable[[], T], rank: int) -> tuple[tuple[T] | MpistratError, Exception | None]:
    """Return what `find` returns, or an error that other ranks can be sent, and its cause if it is not that error itself."""
    try:
        return (find(),), None
    except MpistratError as error:
        return error, None
    except Exception as error:  # others than ours may not be made again from a pickle
        return AgreementError(f"rank {rank} failed for all: {type(error).__name__}: {error}"), error


def _found(answer: tuple[T] | MpistratError, cause: Exception | None) -> T:
    if isinstance(answer, MpistratError):
        answer.raised_everywhere = True
        raise answer from cause
    return answer[0]


class Signature:
    """The part of a call that must be the same on all ranks.

    `nbytes` is for the flight record: what this rank passes.
    """

    __slots__ = ("digest", "nbytes", "text")

    def __init__(self, text: str, nbytes: int = 0) -> None:
        self.text, self.digest, self.nbytes = text, digest_of(text), nbytes

    def text_after(self, noted: int) -> str:
        """Return the text of the call, with that of the notes before it, whose digest is `noted`."""
        return self.text + notes_text(_notes_of.get(noted, ()))


class CallsDifferError(Exception):
    """Ranks of a node are in different calls, of these digests."""

    def __init__(self, digests: list[int]) -> None:
        super().__init__("ranks of a node are in different calls")
        self.digests = digests

    @property
    def all_compare(self) -> bool:
        """Whether no rank has done anything but compare yet, so that they can exchange texts."""
        return all(digest & COMPARED for digest in self.digests)


@lru_cache(_DIGESTS_KEPT)
def digest_of(text: str) -> int:
    """Return the digest of a text: the same in every process, even, and below 2**63."""
    digest = hash_of(text) & _DIGEST_MASK
    _keep(digest, (text,))
    return digest


def chained(digest: int, following: int) -> int:
    """Return the hash of a sequence of texts: `digest` is that of all but the last one, `following` that of the last one."""
    return (digest * 0x9E3779B97F4A7C15 + following) & _DIGEST_MASK


def keep_notes(digest: int, notes: Sequence[str], noted: int) -> None:
    """Keep the texts that a digest of several notes stands for: `notes`, and that of the digest `noted` unless it is 0."""
    if digest not in _notes_of:
        _keep(digest, (*notes, *_notes_of.get(noted, ())))


def notes_text(notes: Sequence[str]) -> str:
    """Return what was noted before a call, in words: the last few of it."""
    if not notes:
        return ""
    more = f"{len(notes) - _NOTES_SHOWN} others and " if len(notes) > _NOTES_SHOWN else ""
    return f", after {more}{'; '.join(notes[-_NOTES_SHOWN:])}"


def _keep(digest: int, notes: tuple[str, ...]) -> None:
    if len(_notes_of) >= _DIGESTS_KEPT:
        _notes_of.clear()
    _notes_of[digest] = notes


class Rows(Protocol):
    """How ranks on several nodes exchange rows; see `transports.small.RankRows`."""

    found: Array

    def steps(self, numbers: Sequence[int], memory: Array | None = None) -> Steps:
        """Return the steps after which the numbers of all ranks begin the rows of `found`."""


class Agreement:
    """Compares calls across the ranks of a group, before they do anything else: by their `rows` if they have any, or by MPI."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sequence = 0
        self.rows: Rows | None = None
        self._row = np.zeros(ROW, np.int64)
        self._rows = np.zeros((group.size, ROW), np.int64)

    def check(
        self,
        call: str,
        error: Exception | None = None,
        complete: Completion | None = None,
        facts: Sequence[int] = (0, 0),
        number: int = 0,
        run: Callable[[Steps], None] | None = None,
        memory: Array | None = None,
    ) -> Array:
        """Check that all ranks pass the same text, and return the two `facts` of every rank. A collective call.

        If texts differ, every rank raises an AgreementError that lists them. `error` says why this rank cannot make the call:
        it is raised here, and the other ranks raise an AgreementError. What is returned, int64 (ranks, 2), is valid until the
        next call. By default MPI is polled without a deadline, and the `number` in error messages is counted here. The steps of
        rows, which may hold some memory, are run by `run`.
        """
        self._sequence += 1
        digest = digest_of(call if error is None else f"{call} {error!r}")
        rows = self._rows
        if self.rows is not None and run is not None:
            run(self.rows.steps((digest, *facts), memory))
            rows = self.rows.found
        else:
            self._row[:] = digest, *facts
            (complete or _poll)(lambda: self._group.comm.Iallgather(self._row, self._rows))
        if (rows[:, 0] != digest).any():
            self.raise_on_all(call, error, number, complete)
        if error is not None:
            raise error
        return rows[:, 1:ROW]

    def barrier(self, digest: int) -> Steps:
        """Wait until all ranks have entered, and compare the digests of their calls. A collective call.

        It exchanges what `check` does, so that a rank in the one is compared with a rank in the other. If digests differ, all
        ranks raise a CallsDifferError.
        """
        numbers = ~digest, 0, 0  # no rank passes such a digest to `check`
        if self.rows is not None:
            yield from self.rows.steps(numbers)
        else:
            self._row[:] = numbers
            request = self._group.comm.Iallgather(self._row, self._rows)
            try:
                yield from until(request.Test)
            except BaseException:
                keep_alive_for_peers(request)
                raise
        found = (self._rows if self.rows is None else self.rows.found)[:, 0]
        if (found != ~digest).any():
            raise CallsDifferError([~int(row) for row in found])

    def raise_on_all(self, call: str, error: Exception | None, number: int, complete: Completion | None) -> NoReturn:
        """Exchange the texts of all ranks and raise on all. A collective call, made when calls are known to differ."""
        mine = call if error is None else failed_text(call, error)
        answers: list[tuple[str, bool]] = self.exchange((mine, error is not None), complete)
        if error is not None:
            raise error
        told = dict(zip(self._group.ranks, answers, strict=True))
        texts = {rank: text for rank, (text, _) in told.items()}
        disagreement = calls_differ(number or self._sequence, texts, self._group.name)
        disagreement.failed_ranks = tuple(rank for rank, (_, has_failed) in told.items() if has_failed)
        raise disagreement

    def exchange(self, value: object, complete: Completion | None = None) -> list[Any]:
        """Return the values of all ranks, of what JSON can hold. A collective call.

        It does not block inside MPI: a rank that has raised the watcher's verdict does not take part, and the others must be
        able to raise it too.
        """
        mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
        size, sizes = np.array([mine.size]), np.empty(self._group.size, np.int64)
        (complete or _poll)(lambda: self._group.comm.Iallgather(size, sizes))
        whole = np.empty(sizes.sum(), np.uint8)
        (complete or _poll)(lambda: self._group.comm.Iallgatherv(mine, [whole, sizes.tolist()]))
        return [json.loads(part.tobytes()) for part in np.split(whole, sizes.cumsum()[:-1])]


def failed_text(call: str, error: Exception) -> str:
    """Return what the others are told of a call that a rank cannot make."""
    return f"{call}, which failed: {type(error).__name__}: {error}"


def calls_differ(number: int, texts: Mapping[int, str], group: str = "world") -> AgreementError:
    """Return the error that lists which rank made which call."""
    variants = ranks_by(sorted(texts.items()))
    error = AgreementError(mismatch_text(f"collective {number} of group {group}", variants))
    error.calls = tuple(variants)
    return error


def pause(began: float) -> None:
    """Give up the core in a wait that began then: at first by a yield, later by short sleeps, as the wait may be long."""
    if time.monotonic() - began < _YIELD_SECONDS:
        os.sched_yield()
    else:
        time.sleep(_POLL_SECONDS)


def wait_for(request: MPI.Request, check: Callable[[], None] = lambda: None) -> None:
    """Wait for what all ranks have to start, unless `check` raises, or the watcher finds that it never completes."""
    watching, began = watcher(), time.monotonic()
    try:
        while not request.Test():
            if watching is not None:
                watching.raise_verdict()
            check()
            pause(began)
    except BaseException:
        keep_alive_for_peers(request)
        raise


def all_agree(comm: MPI.Intracomm, yes: bool) -> bool:
    """Return whether all ranks say yes. A collective call, in which none waits for one that has failed."""
    found = np.array(yes)
    wait_for(comm.Iallreduce(MPI.IN_PLACE, found, MPI.LAND))
    return bool(found)


def _poll(enter: Callable[[], MPI.Request]) -> None:
    wait_for(enter())
