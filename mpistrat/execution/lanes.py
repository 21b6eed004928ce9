"""The INTRA lane and what is between nodes meanwhile: sequences of steps that one thread advances in turn.

File law: what a lane does next is a function of chunk indexes only, never of what happens to be ready, so that all ranks
issue the operations of a group in one order.

With depth 2 the INTRA lane runs head 0, head 1, tail 0, head 2, tail 1, …. Head k is what comes before the middle of chunk k
(copy in, reduce-scatter), tail k what comes after it. Middles start in the order of the chunks, `max_in_flight` of them at a
time: one where they share a group without channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpistrat.transports.steps import WAITING, WORKED, Steps

__all__ = ["overlap", "side_by_side"]

ChunkSteps = Callable[[int], Steps]


def overlap(num_chunks: int, depth: int, max_in_flight: int, head: ChunkSteps, middle: ChunkSteps, tail: ChunkSteps) -> Steps:
    """Return the steps of all chunks, with at most `depth` chunks between their head and their tail."""
    heads_done = num_through = 0
    through = [False] * num_chunks

    def intra() -> Steps:
        nonlocal heads_done
        for turn in range(num_chunks + depth - 1):
            if turn < num_chunks:
                yield from head(turn)
                heads_done += 1
                yield WORKED  # the middle of this chunk may start before the next chunk is copied
            finished = turn - depth + 1
            if finished >= 0:
                while not through[finished]:
                    yield WAITING
                yield from tail(finished)

    def inter(chunk: int) -> Steps:
        nonlocal num_through
        yield from middle(chunk)
        through[chunk] = True
        num_through += 1

    lanes = [intra()]
    started = 0
    while lanes:
        answers = [next(lane, None) for lane in lanes]
        lanes = [lane for lane, answer in zip(lanes, answers, strict=True) if answer is not None]
        if started < heads_done and started - num_through < max_in_flight:
            lanes.append(inter(started))
            started += 1
            answers.append(WORKED)
        yield any(answers)


def side_by_side(lanes: Sequence[Steps]) -> Steps:
    """Return the steps of all lanes, each of which takes one in turn."""
    while lanes:
        answers = [next(lane, None) for lane in lanes]
        lanes = [lane for lane, answer in zip(lanes, answers, strict=True) if answer is not None]
        yield any(answers)
