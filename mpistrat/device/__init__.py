"""What a GPU does for us."""
