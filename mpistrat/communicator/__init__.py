"""Collectives on arrays over all ranks of an MPI communicator."""
