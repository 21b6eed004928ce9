"""Choose algorithms by what was measured on this cluster."""
