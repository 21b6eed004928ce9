"""Who started me: launchers, MPI start, the right mpiexec, a clean end."""
