"""Groups of ranks: their communicators, and how the ranks of a group compare calls and wait for each other."""
