"""Arrays in, arrays out, over all ranks of an MPI communicator."""
