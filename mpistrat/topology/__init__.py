"""Topology: which rank is placed on which node, and which GPU each rank drives."""
