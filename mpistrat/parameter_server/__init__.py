"""Asynchronous training: servers that keep variables, workers that change them, and the chief that tells workers what to do."""
