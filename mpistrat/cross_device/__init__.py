"""One call for many arrays."""
