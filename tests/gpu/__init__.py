"""One GPU, several ranks: for the parts that drive a GPU, when they come."""
