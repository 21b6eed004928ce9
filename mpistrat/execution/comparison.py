"""Calls, and their comparison: whether all ranks make the same, and which they make where they do not.

A call has a digest, a 64-bit hash of its description. Ranks that make different calls find out before a result is returned:

- ranks of a node compare the digests of their calls at every barrier in shared memory, before one reads what another wrote;
- messages between nodes carry the digest in their tags: those of different calls never match, and `mpistrat.watch` reports it;
- a call that is made for the first time, and every verb that needs the shapes of the other ranks, is compared on all ranks
  first, by a small exchange;
- what is not a collective by itself (a structure, an assignment outside run) is noted, and compared with the next call;
- where MPI reduces small arrays between nodes, it combines digests with them (`transports.mpi_world`); calls with others are
  compared afterwards: every 128 small calls, and before the program ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mpistrat.arrays import Array
from mpistrat.errors import CollectiveError
from mpistrat.groups.agreement import (
    COMPARED,
    Agreement,
    CallsDifferError,
    Completion,
    Signature,
    calls_differ,
    digest_of,
    notes_text,
)
from mpistrat.groups.group import MOST_UNCONFIRMED
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.lazy import MPI
from mpistrat.steps import Steps, ends_soon
from mpistrat.transports.window import NodeWindow
from mpistrat.watch import watcher
from mpistrat.watch.record import RankFile
from mpistrat.watch.recorder import recorder
from mpistrat.watch.states import entered

Facts = list[list[int]]
"""Numbers of each rank."""

_LEAST_SECONDS = 0.2  # a call that all ranks entered just before the deadline still gets this long


@dataclass
class Call:
    """A numbered call of a verb, with its arguments."""

    number: int
    verb: str
    signature: Signature
    seconds: float = 0.0  # the deadline, from the beginning of the call; 0 means none
    is_started: bool = False
    ends: float = 0.0  # on the clock of `time.monotonic`; 0: there is no deadline, or the call has not begun
    noted: int = 0  # hash of the notes that are compared with it
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"collective {self.number}, {self.signature.text}"

    @property
    def digest(self) -> int:
        """The hash of signature and notes."""
        return self.signature.digest ^ self.noted

    @property
    def text(self) -> str:
        """The call with its arguments, and with the notes before it that tell something."""
        return f"{self.signature.text}{notes_text(self.notes)}" if self.notes else self.signature.text

    def start_clock(self) -> None:
        """Start the clock of the deadline."""
        self.ends = time.monotonic() + self.seconds if self.seconds else 0.0

    @property
    def rest_seconds(self) -> float:
        """The seconds left until the deadline; 0 without a deadline."""
        return max(self.ends - time.monotonic(), _LEAST_SECONDS) if self.ends else 0.0


class Comparison:
    """Compares the calls of the ranks of a communicator: in the memory of a node, by messages, and by what ranks record."""

    def __init__(self, hierarchy: Hierarchy, agreement: Agreement, window: NodeWindow | None) -> None:
        self._agreement, self._window, self._one_node = agreement, window, hierarchy.world.num_nodes == 1
        self._present, self._rank, self._job_ranks = hierarchy.call, hierarchy.job_rank, hierarchy.job_ranks
        self._communicator, self._watcher, self._recorder = hierarchy.number, watcher.start(), recorder()
        self._comm = hierarchy.world_group.comm

    def agree(
        self,
        call: Call,
        error: Exception | None,
        facts: Sequence[int],
        memory: Array | None,
        run: Callable[[Call, Steps], None],
        complete: Completion,
    ) -> Facts:
        """Wait until all ranks make the same call: see `Guard.agree`. A collective call.

        Ranks on several nodes exchange rows, if they can. Otherwise ranks of a node compare digests at a barrier in its memory.
        Where these are all ranks, none with a deadline or an error, that is all; else all ranks compare digests by messages.
        `run` runs steps. Where digests differ, all exchange texts, unless a rank has gone on without a comparison, which raises
        a CallsDifferError: then the watcher asks for them.
        """
        text = call.text
        # also on a rank alone on its node: messages of the call carry it
        self._present.digest = digest_of(text if error is None else f"{text} {error!r}") | COMPARED
        if self._window is not None and self._agreement.rows is None:
            try:
                _run_soon(run, call, self._window.barrier_with(facts, memory))
            except CallsDifferError as differ:
                if not differ.all_compare:
                    raise
                if self._one_node:
                    self._agreement.raise_on_all(text, error, call.number, complete)
            else:
                # with a deadline all learn together whether all have arrived in time
                if self._one_node and error is None and not call.ends:
                    return self._window.facts()
        found: Facts = self._check(call, error, facts, memory, partial(_run_soon, run, call), complete).tolist()
        return found

    def _check(
        self,
        call: Call,
        error: Exception | None,
        facts: Sequence[int],
        memory: Array | None,
        run: Callable[[Steps], None],
        complete: Completion,
    ) -> Array:
        """Compare a call across all nodes, and return the facts of all ranks: see `Agreement.check`. A collective call."""
        found = self._agreement.check(call.text, error, complete, facts, call.number, run, memory)
        if call.seconds and self._agreement.rows is not None:
            complete(self._comm.Ibarrier)  # with a deadline all learn together whether all have arrived in time
        return found

    def history(
        self, call: Call, history: int, run: Callable[[Call, Steps], None], complete: Completion
    ) -> CollectiveError | None:
        """Compare a hash of the calls that MPI has reduced since the last time; return the error of the first that differs.

        A collective call.
        """
        found = self._check(call, None, (history, 0), None, partial(run, call), complete)
        if all(history == other for other, *_ in found.tolist()):
            return None
        # the last call of a number: those before it were refused
        made = [each for each in RankFile(self._recorder.memory).calls() if each.communicator == self._communicator]
        mine = {each.number: each.text for each in reversed(made)}
        recent = sorted(mine)[-MOST_UNCONFIRMED - 1 :]
        sent = self._agreement.exchange([(number, mine[number]) for number in recent], complete)
        every: list[dict[int, str]] = [dict(pairs) for pairs in sent]
        first = next((n for n in recent if len({texts.get(n) for texts in every}) > 1), call.number)
        texts = [each.get(first, "another") for each in every]
        return calls_differ(first, dict(zip(self._job_ranks, texts, strict=True)))

    def difference(self, error: BaseException, number: int, text: str) -> CollectiveError | None:
        """Return the error that names each rank's call, if it explains `error`; this rank's has a number and a text.

        Truncated MPI messages, for instance, come from ranks in different calls.
        """
        if not isinstance(error, (CallsDifferError, MPI.Exception)):
            return None
        texts = {self._rank: text}
        states = [] if self._watcher is None else self._watcher.compare(ranks=self._job_ranks)
        calls = entered(states, (self._communicator, number))
        for state in states:
            found = calls.get(state.rank)
            texts.setdefault(state.rank, found.text if found else f"({state.doing()})")
        if isinstance(error, CallsDifferError) or len(set(texts.values())) > 1:
            return calls_differ(number, texts)
        return None


def _run_soon(run: Callable[[Call, Steps], None], call: Call, steps: Steps) -> None:
    """Run steps that most often end at once."""
    if not ends_soon(steps):
        run(call, steps)
