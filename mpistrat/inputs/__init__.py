"""Distributed datasets: global batches in, per-replica batches out."""
