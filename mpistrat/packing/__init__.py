"""How many arrays become few buffers."""
