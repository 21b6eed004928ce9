"""Launchers: which one started this process, starting MPI, finding the right mpiexec, and ending the job cleanly."""
