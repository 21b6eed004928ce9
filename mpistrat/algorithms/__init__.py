"""Algorithms: in which phases a collective runs. Pure: no MPI, no GPU."""
