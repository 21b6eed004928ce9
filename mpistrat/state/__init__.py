"""What must be equal everywhere."""
