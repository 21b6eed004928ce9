"""Context: the current strategy and replica context of a thread, and values with one component per replica."""
