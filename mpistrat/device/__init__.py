"""The GPU of a rank: memory, streams, kernels, and the exchange of arrays with other libraries."""
