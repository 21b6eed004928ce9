"""Bind plans to transports and memory, and run them."""
