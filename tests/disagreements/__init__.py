"""Programs in which ranks disagree, run by the hundred: who is told, who computes on, and whose memory changes.

A program is a sequence of calls, which are data (`calls`), and the same with a deviation (`deviations`) of some ranks: one,
half, or all but one. How it may end follows from what differs between the two. A kind is such a pair: all that `kinds` makes
of its sequences and of the deviations that fit them, and pairs that are drawn from a seed (`drawing`). A case is a kind, a
number of elements, and whether all ranks made the same calls before (warm) or not. A job runs many cases, one after the other,
each with a strategy of its own; one that dies or stands still is ended, and a new one takes the next case.

``python -m tests.disagreements`` runs what its options choose, or all. Shapes are those of ``mpistrat run --nodes``, ``1x2``
being this machine as it is, and ``hosts:2+2``: so many ranks on each host of a lab. Each case is printed with its class (see
`verdicts`) and with what each rank did; an exclamation mark and the exit code 1 tell of one that is not as it must be.
"""
