"""Packing: copies many arrays into few buffers, and back."""
