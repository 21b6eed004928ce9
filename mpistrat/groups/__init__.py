"""Groups of ranks: their communicators, and how the ranks of a group agree, wait and meet."""
