"""Cluster specs and resolvers: which task each rank is."""
