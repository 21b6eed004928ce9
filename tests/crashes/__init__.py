"""Saves of checkpoints that are stopped at every point, of a job and of a machine, and by errors of files.

Each call that changes files is recorded, on every rank, and the messages between ranks. From these follow all moments at which
a job can stop; from each follows what a machine that loses its power then may have kept: what was not synchronized may be
there, in part or not at all. In every one of these states the last checkpoint or the one before must be restored, and a save
must succeed. Then each of the calls fails, once or from then on.
"""
