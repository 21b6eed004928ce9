"""Benchmark the algorithms on this cluster, and fit the cost model that auto chooses by."""
