"""In which phases a collective runs. Pure: no MPI, no GPU."""
