"""Group: a communicator of this library, with its name, the ranks of the job in it, and the call that is under way in it."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from hashlib import blake2b

from mpistrat.lazy import MPI
from mpistrat.settings import STRICT, Snapshot
from mpistrat.steps import Steps

_CHANNELS = 32
_FIRST_TAG, _MAX_TAG = 1 << 15, 1 << 30  # smaller tags are used for messages outside of calls
MOST_UNCONFIRMED, _BYTES_PER_CALL = 128, 1 << 12
PROBES = 8
"""How often to look for a message: MPI may show one only some probes after the one that received it."""

_to_confirm: set[CallState] = set()  # keeps them: ranks collect garbage at different times, and compare at exit together


class CallState:
    """What is known of the collective call that is under way on the communicators of a hierarchy: one at a time.

    Ranks compare its `digest` before one reads memory of another, and messages carry it in their tags, so that messages of
    different calls are never matched. Calls that MPI carries out without a comparison are `unconfirmed`, a large one counted
    as several, until `confirm`, a collective call, compares the history of these `calls` on all ranks: at once, if `is_strict`
    says that every call is compared before it returns. `must_poll` is set where the call has a deadline or was started: a
    blocking MPI call that waits for other ranks could not be given up. The deadline passes when ``time.monotonic()`` is `ends`;
    0 means none.
    """

    def __init__(self) -> None:
        self.digest = self.unconfirmed = 0
        self.ends = 0.0
        self.calls: list[int] = []
        self.must_poll, self.has_failed, self.settings = False, False, Snapshot()  # compared by the communicator
        self.is_strict = self.settings[STRICT]
        self.compare_history: Callable[[int], None] = lambda history: None  # until calls are compared
        self.drive: Callable[[Steps], None] = _run_to_end
        tag_ub = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0
        self._span = (min(int(tag_ub), _MAX_TAG) - _FIRST_TAG) // _CHANNELS

    def tag(self, channel: int) -> int:
        """Return the tag of the call's messages on a channel, of which there are 32."""
        if self._span <= 0:  # MPI has only the smallest range of tags that the standard allows
            return channel
        return _FIRST_TAG + (self.digest >> 1) % self._span * _CHANNELS + channel

    def add_unconfirmed(self, nbytes: int) -> None:
        """Record that this call ran as an MPI collective without comparing it with other nodes; compare some calls later.

        A comparison takes some 20 small calls of a node. One for 128 of them, or for fewer large ones, adds a few percent.
        """
        if not self.unconfirmed:
            _to_confirm.add(self)
        self.calls.append(self.digest)
        self.unconfirmed += weight(nbytes) - bool(self.unconfirmed)
        if self.is_strict or self.unconfirmed >= MOST_UNCONFIRMED:
            self.confirm()

    def count(self) -> None:
        """Count a call that begins while earlier ones are unconfirmed; confirm them if it is the last that may be."""
        if self.unconfirmed:
            self.unconfirmed += 1
            if self.unconfirmed >= MOST_UNCONFIRMED:
                self.confirm()

    def confirm(self) -> None:
        """Confirm the calls that have not been confirmed yet. A collective call if there are any."""
        if self.unconfirmed:
            history = blake2b(array("Q", self.calls), digest_size=7).digest()
            self.compare_history(int.from_bytes(history, "little"))
            self.unconfirmed = 0
            self.calls.clear()
            _to_confirm.discard(self)


def weight(nbytes: int) -> int:
    """Return as how many unconfirmed calls one of `nbytes` bytes counts."""
    return nbytes // _BYTES_PER_CALL + 1


def _run_to_end(steps: Steps) -> None:
    for _ in steps:
        os.sched_yield()


class Group:
    """Some ranks of the job and the communicator that joins them, made for this group, which frees it.

    `name` is for error messages: ``world``, ``intra node0``, ``rail 1``; so are the `ranks`, those of the job, in the order of
    their rank in `comm`. Groups of one hierarchy share the `call` that is under way.
    """

    def __init__(self, comm: MPI.Comm, name: str, call: CallState | None = None) -> None:
        assert isinstance(comm, MPI.Intracomm), f"{name}: {comm!r} is not an intracommunicator"
        self.comm, self.name, self.ranks = comm, name, job_ranks_of(comm)
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.call = CallState() if call is None else call
        self.settings = self.call.settings

    def close(self) -> None:
        """Free the communicator. A collective call in this group; the group cannot be used afterwards."""
        free(self.comm)

    def __repr__(self) -> str:
        return f"Group({self.name}, rank={self.rank}({self.size}))"


def free(comm: MPI.Comm) -> None:
    """Free a communicator, in which nothing more is sent. A collective call, in which no rank waits for another.

    What was sent and not received, such as notices that came too late, is received here: MPICH and others give the next
    communicator the number of one that was freed, and would deliver it there.
    """
    status = MPI.Status()
    for _ in range(PROBES):
        while (message := comm.Improbe(status=status)) is not None:
            message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
    comm.Free()


def job_ranks_of(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks in COMM_WORLD of the members of a communicator, in its order."""
    own, job = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = own.Translate_ranks(None, job)
    own.Free()
    job.Free()
    return tuple(ranks)


_kept: list[object] = []


def keep_alive_for_peers(memory: object) -> None:
    """Keep memory of a failed collective for ever: late peers may still use it, and MPI the buffers of a pending request."""
    _kept.append(memory)
