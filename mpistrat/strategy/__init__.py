"""What the user holds."""
