"""Saves of checkpoints that are stopped at every point: of a job, of a machine, and by errors of files.

``points`` records each call that changes files, on every rank, and the messages between ranks. From these follow all moments
at which a job can stop; from each follows what a machine that loses its power then may have kept: what was not synchronized may
be there, in part or not at all. In every one of these states the last checkpoint or the one before must be restored, and a save
must succeed. ``errors`` lets each of the calls fail, once or from then on. ``kills`` ends jobs by SIGKILL at random instants,
and continues each from what the one before has left::

    python -m tests.crashes points --shape 2x2
    python -m tests.crashes errors --shape 2x2
    python -m tests.crashes kills --shape 1x2 --shape 2x2 --jobs 100
"""
