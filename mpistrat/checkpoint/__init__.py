"""Checkpoints: the state of a job in files, from which any number of ranks continues."""
