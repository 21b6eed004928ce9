"""Which rank sits where."""
