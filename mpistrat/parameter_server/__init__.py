"""Asynchronous training: servers keep variables, workers change them, and the chief schedules functions on workers."""
