"""Feed the replicas."""
