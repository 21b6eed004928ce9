"""The INTRA lane and the INTER lane: two sequences of steps that one thread advances in turn.

File law: what a lane does next is a function of chunk indexes only, never of what happens to be ready, so that all ranks
issue the operations of a group in one order.

With depth 2 the INTRA lane runs head 0, head 1, tail 0, head 2, tail 1, …, and the INTER lane middle 0, middle 1, ….
Head k is what comes before the middle of chunk k (copy in, reduce-scatter), tail k what comes after it.
"""

from __future__ import annotations

from collections.abc import Callable

from mpistrat.transports.base import WAITING, WORKED, Steps

__all__ = ["overlap"]

ChunkSteps = Callable[[int], Steps]


def overlap(num_chunks: int, depth: int, head: ChunkSteps, middle: ChunkSteps, tail: ChunkSteps) -> Steps:
    """Return the steps of all chunks, with at most `depth` chunks between their head and their tail."""
    heads_done = middles_done = 0

    def intra() -> Steps:
        nonlocal heads_done
        for turn in range(num_chunks + depth - 1):
            if turn < num_chunks:
                yield from head(turn)
                heads_done += 1
                yield WORKED  # the other lane may start on this chunk before the next one is copied
            finished = turn - depth + 1
            if finished >= 0:
                while middles_done <= finished:
                    yield WAITING
                yield from tail(finished)

    def inter() -> Steps:
        nonlocal middles_done
        for chunk in range(num_chunks):
            while heads_done <= chunk:
                yield WAITING
            yield from middle(chunk)
            middles_done += 1

    lanes = [intra(), inter()]
    while lanes:
        worked = [next(lane, None) for lane in lanes]
        lanes = [lane for lane, answer in zip(lanes, worked, strict=True) if answer is not None]
        yield any(worked)
