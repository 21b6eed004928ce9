"""Which role each task plays."""
