"""Benchmark the algorithms on this cluster, and correct the cost model that auto chooses by."""
