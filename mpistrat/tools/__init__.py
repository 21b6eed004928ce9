"""For the person at the terminal."""
