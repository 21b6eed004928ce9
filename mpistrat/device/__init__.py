"""The GPU of a rank: memory, streams, kernels."""
