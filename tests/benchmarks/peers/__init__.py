"""The programs that compete: each is started as ranks in a lab, with the interpreter of its own environment."""
